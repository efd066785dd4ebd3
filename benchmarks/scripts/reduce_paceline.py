"""The mean of a gradient by `pl.distribute`: paceline run benchmarks/scripts/reduce_paceline.py --replicas 2"""

import time

import torch
from flat import Flat, check, parse, write

import paceline as pl


def main() -> None:
    options = parse(__doc__)
    model = Flat(options.bytes // 4)
    model, optimizer = pl.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank, world = pl.place().rank, pl.place().world
    ready: list[float] = []
    done: list[float] = []
    # Hooks run in the order of registration: when this one does, backward is over and distribute has the gradient.
    model.weight.register_post_accumulate_grad_hook(lambda _: ready.append(time.monotonic()))
    for _ in range(options.repeats):
        optimizer.zero_grad()
        (model() * (rank + 1)).backward()
        done.append(time.monotonic())
    check(model.weight, (world + 1) / 2)
    write(options.times, rank, ready, done)


if __name__ == "__main__":
    main()
