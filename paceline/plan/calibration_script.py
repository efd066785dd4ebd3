"""What calibration trains: models of a few sizes, with next to nothing to compute. Run by `paceline run -m`, as it
is.

Beside its steps each replica times its forward and backward by themselves, while the others do the same. What a step
takes beyond that is the exchange.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import msgspec
import torch
from torch import nn

import paceline as pl
from paceline.errors import PacelineError
from paceline.loop.returned_loss import read_loss
from paceline.plan.calibration import ExchangePoint
from paceline.profile.step_times import StepWork, repeat, timing

SAMPLES = 4  # of a replica
WARM_UP = 4
# width, depth, whether there are BatchNorms
CASES = ((32, 4, False), (256, 4, False), (1024, 4, False), (1536, 4, False), (32, 40, False), (32, 8, True))

FEW = (CASES[0], CASES[2], CASES[3])
SMALL, MORE_OF_SMALL = 256, 8  # width, and how many times as many steps: the first of a millisecond's take longer


def make_model(width: int, depth: int, norms: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), *([nn.BatchNorm1d(width)] if norms else [])]
    return nn.Sequential(*layers)


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch).square().mean()
    return found


def measure(width: int, depth: int, norms: bool, steps: int) -> ExchangePoint:
    """Returns what a step of this model takes beyond computing."""
    torch.manual_seed(0)
    model = make_model(width, depth, norms)
    alone = copy.deepcopy(model)
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9), loss)
    batch_size = SAMPLES * trainer.replicas
    marks = [time.perf_counter()]
    for batch in trainer.batches(torch.randn(batch_size * steps, width), batch_size=batch_size):
        trainer.step(batch)
        marks.append(time.perf_counter())
    # A cut model holds its loss against its graph in steps 1, 2, 4 …
    steady = [number for number in range(WARM_UP + 1, len(marks)) if number & (number - 1)]
    if not steady:
        raise PacelineError(f"a replica made {len(marks) - 1} steps, too few to measure: try again on a quiet machine")
    lasted = timing([marks[number] - marks[number - 1] for number in steady])
    trainer.close()
    work = StepWork(loss, alone, torch.randn(SAMPLES, width), lambda returned: read_loss(returned, "in calibration"))
    work.once(work.batch)
    computed, _ = repeat(lambda: work.once(work.batch), time.monotonic() + 2.0)
    beyond = max(1e-7, lasted.seconds - computed.seconds)
    parameters = list(alone.parameters())
    return ExchangePoint(
        bytes=sum(parameter.nbytes for parameter in parameters),
        seconds=beyond,
        low=max(1e-7, lasted.low - computed.seconds),
        high=max(beyond, lasted.high - computed.seconds),
        tensors=len(parameters),
        norms=depth if norms else 0,
        computed_s=computed.seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--no-norms", action="store_true")
    parser.add_argument("--few", action="store_true", help="three sizes")
    options = parser.parse_args()
    chief = pl.place().rank == 0
    cases = [case for case in CASES if not (case[2] and options.no_norms)]
    times = {case: MORE_OF_SMALL if case[0] <= SMALL else 1 for case in CASES}
    points = [measure(*case, options.steps * times[case]) for case in (FEW if options.few else cases)]
    if chief:
        options.out.write_bytes(msgspec.json.encode(points))


if __name__ == "__main__":
    main()
