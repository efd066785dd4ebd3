"""Push and pull: paceline run benchmarks/scripts/push_paceline.py --replicas 2 --servers 1 --async"""

from typing import Any

import torch
from push import LR, check, meet, parse, times_of
from stopwatch import Stopwatch
from torch import nn

import paceline as pl


class Given(torch.autograd.Function):
    """A loss whose gradient is there already."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient.detach(), None  # another tensor of the same memory: autograd takes it and copies nothing


class Flat(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))


def main() -> None:
    options = parse(__doc__).parse_args()
    model = Flat(options.bytes // 4)
    gradient = torch.ones(options.bytes // 4)
    trainer = pl.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=LR), lambda model, _: Given.apply(model.weight, gradient)
    )
    # Samples that say nothing. Async gives a replica one of them a step, sync one to each of the replicas.
    samples = torch.zeros(options.steps * trainer.replicas, 1)
    at_once = 1 if isinstance(trainer.rule, pl.Async) else trainer.replicas
    meet(options, trainer.replica, trainer.replicas)
    watch = Stopwatch(times_of(options, trainer.replica))
    for batch in trainer.batches(samples, at_once, shuffle=False):
        trainer.step(batch)
        watch.step()
    found = trainer.evaluate(torch.zeros(1, 1), lambda model, _: model.weight.amax())
    check(found, trainer.steps)


if __name__ == "__main__":
    main()
