"""What a core of this machine does by itself and beside busy ones: moving memory, computing. Prints JSON.

python -m paceline.plan.machine_script
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable

import torch

from paceline.exchange.board import Board
from paceline.exchange.mailboxes import BOX_BYTES, Peers
from paceline.memory import segment
from paceline.memory.arena import Arena
from paceline.profile.neighbours import busy_neighbours, on_cores
from paceline.profile.step_times import repeat

_COPIED_BYTES = 64 << 20
_THROWS = 400  # of a small tensor, there and back
_LONGEST_S = 20.0
_MATRIX = 384


def factor(work: Callable[[], object]) -> tuple[float, float]:
    """Returns the seconds of one core alone, and by how much longer it takes while all others do the same."""
    cores = sorted(os.sched_getaffinity(0))
    with on_cores(cores[:1], 1):
        work()
        alone, _ = repeat(work, time.monotonic() + 1.0, long_s=0.5)
        with busy_neighbours(work, cores[1:]):
            beside, _ = repeat(work, time.monotonic() + 1.0, long_s=0.5)
    return alone.seconds, max(1.0, beside.seconds / alone.seconds)


def mailbox_s() -> float:
    """Returns how long a small tensor takes from one device of a cut model to another that waits for it."""
    cores = sorted(os.sched_getaffinity(0))
    board = Board.create(2, supervised=True)
    arena = Arena.of(segment.make("mailboxes", 4 * BOX_BYTES))
    child = os.fork()
    rank = 0 if child else 1
    try:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        torch.set_num_threads(1)
        peers = Peers(arena, board, rank, rank, 2, _LONGEST_S)
        ball = torch.zeros(16)
        lasted = []
        for _ in range(_THROWS):
            began = time.perf_counter()
            if rank == 0:
                peers.send(ball, 1)
            ball = peers.receive(1 - rank)
            if rank == 1:
                peers.send(ball, 0)
            lasted.append(time.perf_counter() - began)
    finally:
        if not child:
            os._exit(0)
        os.sched_setaffinity(0, cores)
        os.waitpid(child, 0)
    return statistics.median(lasted[_THROWS // 4 :]) / 2


def main() -> None:
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    target = source.clone()
    one, other = torch.randn(_MATRIX, _MATRIX), torch.randn(_MATRIX, _MATRIX)
    copying, memory = factor(lambda: target.copy_(source))
    _, compute = factor(lambda: one @ other)
    cores = len(os.sched_getaffinity(0))
    bandwidth = 2 * _COPIED_BYTES / copying
    found = {"one": bandwidth, "all": bandwidth * cores / memory, "memory": memory, "compute": compute}
    found["mailbox"] = mailbox_s()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
