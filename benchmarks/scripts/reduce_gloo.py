"""The sum of a gradient by `all_reduce` on Gloo: torchrun --nproc-per-node 2 benchmarks/scripts/reduce_gloo.py

Dividing it by the number of ranks, which a mean needs and Gloo does not do, is not counted.
"""

import time

import torch.distributed as dist
from flat import Flat, check, parse, write


def main() -> None:
    options = parse(__doc__)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Flat(options.bytes // 4)
    ready: list[float] = []
    done: list[float] = []
    for _ in range(options.repeats):
        model.zero_grad()
        (model() * (rank + 1)).backward()
        ready.append(time.monotonic())
        dist.all_reduce(model.weight.grad)
        done.append(time.monotonic())
    check(model.weight, world * (world + 1) / 2)
    write(options.times, rank, ready, done)
    dist.destroy_process_group()
    time.sleep(0.5)  # Gloo's threads are still ending: torch aborts if the interpreter ends before they have


if __name__ == "__main__":
    main()
