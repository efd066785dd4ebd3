"""Finds the first tensor that differs between two recorded runs.

Float sums depend on their order, so equal runs differ by rounding. A tensor counts as equal when no element is off
by more than `tolerance` times the tensor's largest magnitude (or, for a gradient that is small among gradients, a
tenth of the largest of them): a mistake in an algorithm is orders of magnitude above that, rounding orders below.

Some gradients are nothing but rounding, e.g. of a bias in front of a BatchNorm, which is zero in exact arithmetic.
An optimizer that normalizes, like Adam, makes full steps of them, in a direction that rounding decides. Elements
whose gradients agree less well than the tolerance asks are therefore left out from then on, and counted.

Within a step the causes come before their effects: loss, gradients, optimizer state, parameters, buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from paceline.errors import PacelineError

KINDS = ("loss", "gradient", "optimizer", "model")
DEFAULT_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Difference:
    """One tensor in which two runs differ."""

    step: int
    tensor: str
    error: float  # largest difference of an element
    scale: float  # largest magnitude in the reference
    reason: str | None = None  # if they cannot be compared at all

    def __str__(self) -> str:
        if self.reason:
            return f"step {self.step}: {self.tensor} {self.reason}"
        return f"step {self.step}: {self.tensor} differs by {self.error:.3g} ({self.relative:.2g} of its scale)"

    @property
    def relative(self) -> float:
        if self.error == 0:
            return 0.0
        return self.error / self.scale if self.scale else float("inf")


@dataclass(frozen=True)
class Verdict:
    """What comparing two runs gave."""

    steps: int
    tensors: int
    left_out: int  # elements whose gradients were nothing but rounding
    largest: Difference | None  # the largest relative difference, equal or not
    first: Difference | None  # the first that is too large

    @property
    def equal(self) -> bool:
        return self.first is None


def compare(reference: Path, run: Path, tolerance: float = DEFAULT_TOLERANCE) -> Verdict:
    """Compare the recordings in two folders, step by step."""
    files = sorted(path.name for path in reference.glob("step-*.safetensors"))
    if not files:
        raise PacelineError(f"nothing was recorded in {reference}: the script must call trainer.step")
    comparison = _Comparison(tolerance)
    for step, name in enumerate(files):
        if not (run / name).exists():
            missing = Difference(step, "the step", 0, 0, "was not reached by the other run")
            return comparison.verdict(step, missing)
        for found in comparison.differences(step, load_file(reference / name), load_file(run / name)):
            if found.reason or found.relative > tolerance:
                return comparison.verdict(step, found)
    return comparison.verdict(len(files), None)


class _Comparison:
    """What has been seen so far."""

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._tensors = 0
        self._largest: Difference | None = None
        self._undecided: dict[str, torch.Tensor] = {}  # by parameter: elements that rounding decides

    def verdict(self, steps: int, first: Difference | None) -> Verdict:
        left_out = sum(int(mask.sum()) for mask in self._undecided.values())
        return Verdict(steps, self._tensors, left_out, self._largest, first)

    def differences(
        self, step: int, expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]
    ) -> Iterator[Difference]:
        scales: dict[str, float] = {}
        for name, value in expected.items():
            largest = value.double().abs().nan_to_num().max().item() if value.numel() else 0.0
            scales[_family(name)] = max(scales.get(_family(name), 0.0), largest)
        for name in sorted(expected.keys() | actual.keys(), key=_order):
            if name not in actual:
                yield Difference(step, name, 0, 0, "is missing in the other run")
            elif name not in expected:
                yield Difference(step, name, 0, 0, "is not there in one process")
            else:
                floor = 0.1 * scales[_family(name)]
                found = self._difference(step, name, expected[name].double(), actual[name].double(), floor)
                self._tensors += 1
                if self._largest is None or found.relative > self._largest.relative:
                    self._largest = found
                yield found

    def _difference(
        self, step: int, name: str, expected: torch.Tensor, actual: torch.Tensor, floor: float
    ) -> Difference:
        if expected.shape != actual.shape:
            return Difference(step, name, 0, 0, f"has shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
        if not torch.equal(expected.isfinite(), actual.isfinite()):
            return Difference(step, name, 0, 0, "is not finite in one of the runs")
        off = (expected - actual).abs().nan_to_num()
        scale = max(expected.abs().nan_to_num().max().item() if expected.numel() else 1.0, floor)
        kind, _, rest = name.partition("/")
        if kind == "gradient":
            self._undecided[rest] = self._undecided.get(rest, False) | (off > 0.5 * self._tolerance * expected.abs())
        else:
            parameter = rest.rpartition("/")[0] if kind == "optimizer" else rest
            undecided = self._undecided.get(parameter)
            if undecided is not None and undecided.shape == off.shape:
                off = off.masked_fill(undecided, 0.0)
        return Difference(step, name, off.max().item() if off.numel() else 0.0, scale)


def _family(name: str) -> str:
    """Tensors whose magnitudes can be compared: all gradients, all `exp_avg` …; a model's are each by itself."""
    kind, _, rest = name.partition("/")
    return {"gradient": kind, "optimizer": f"{kind}/{rest.rpartition('/')[2]}"}.get(kind, name)


def _order(name: str) -> tuple[int, str]:
    return KINDS.index(name.split("/")[0]), name
