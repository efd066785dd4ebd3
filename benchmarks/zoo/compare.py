"""Whether two trainings came to the same: every loss that every process saw, and every tensor of the model."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

MODEL_FILE, LOSSES_FILE = "model.safetensors", "losses-{replica}-{device}.json"
CLOSE = 1e-9
SMALLEST_SCALE = 1e-3  # a step's length: tensors that begin at zero are not measured by less
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # BatchNorm's


@dataclass(frozen=True)
class Difference:
    """How far a number is off, as a part of its tensor's largest value, and where it is."""

    relative: float
    where: str


def largest_difference(expected: Path, found: Path, *, statistics: bool) -> Difference:
    """Compares what two runs of `train.py` have written, with or without the running statistics."""
    differences = [*_of_losses(expected, found), *_of_tensors(expected, found, statistics)]
    return max(differences, key=lambda one: math.inf if math.isnan(one.relative) else one.relative)


def _of_losses(expected: Path, found: Path) -> list[Difference]:
    theirs = json.loads((expected / LOSSES_FILE.format(replica=0, device=0)).read_text())
    differences, seen = [], set()
    for path in found.glob(LOSSES_FILE.format(replica="*", device="*")):
        for step, loss in json.loads(path.read_text()).items():
            off = abs(loss - theirs[step]) / abs(theirs[step]) if step in theirs else math.inf
            differences.append(Difference(off, f"the loss of step {step}"))
            seen.add(step)
    return [*differences, *(Difference(math.inf, f"the loss of step {step}") for step in theirs.keys() - seen)]


def _of_tensors(expected: Path, found: Path, statistics: bool) -> list[Difference]:
    mine, theirs = load_file(found / MODEL_FILE), load_file(expected / MODEL_FILE)
    differences = [Difference(math.inf, name) for name in mine.keys() ^ theirs.keys()]
    for name in mine.keys() & theirs.keys():
        if not statistics and name.endswith(STATISTICS):
            continue
        one, other = mine[name].double(), theirs[name].double()
        if one.shape != other.shape:
            differences.append(Difference(math.inf, name))
        elif one.numel():
            scale = max(other.abs().max().item(), SMALLEST_SCALE)
            differences.append(Difference((one - other).abs().max().item() / scale, name))
    return differences
