"""What memory allows: python benchmarks/scripts/push_copies.py --replicas 2

The least that a sync step through shared memory has to do: every replica copies its gradient to where others see it,
and then the replicas, each a part, add the gradients up and subtract the sum from the parameters. Nobody sends anything
or decides anything; they meet at a counter in shared memory.
"""

import argparse
import mmap
import os
from collections.abc import Callable

import torch
from push import LR, check, parse, times_of
from stopwatch import Stopwatch

CHUNK = 1 << 19  # elements: two megabytes, as in Paceline


def train(options: argparse.Namespace, shared: mmap.mmap, number: int, meet: Callable[[], None]) -> float:
    count, replicas = options.bytes // 4, options.replicas
    parameters, *gradients = torch.frombuffer(shared, dtype=torch.float32).split(count)
    gradient, scratch = torch.ones(count), torch.empty(CHUNK)
    watch = Stopwatch(times_of(options, number))
    for _ in range(options.steps):
        gradients[number].copy_(gradient)
        meet()
        for start in range(number * CHUNK, count, replicas * CHUNK):
            whole = slice(start, min(start + CHUNK, count))
            total = gradients[0][whole]
            for other in gradients[1:]:
                total = torch.add(total, other[whole], out=scratch[: total.numel()])
            parameters[whole].add_(total, alpha=-LR)
        meet()
        watch.step()
    return float(parameters.amax())


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()
    replicas, cores = options.replicas, sorted(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    shared = mmap.mmap(-1, (1 + replicas) * (options.bytes // 4) * 4)
    places = memoryview(mmap.mmap(-1, 64 * replicas)).cast("q")
    number, children = 0, []
    for other in range(1, replicas):
        if (child := os.fork()) == 0:
            number = other
            break
        children.append(child)
    os.sched_setaffinity(0, {cores[number % len(cores)]})

    def meet() -> None:
        places[8 * number] += 1
        while any(places[8 * other] < places[8 * number] for other in range(replicas)):
            os.sched_yield()

    found = train(options, shared, number, meet)
    check(found, replicas * options.steps)
    if number:
        os._exit(0)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    main()
