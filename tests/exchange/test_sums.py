"""Small sums through shared memory: all get the same bits, and nobody reads what a faster one has overwritten."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from paceline.exchange.board import Board
from paceline.exchange.members import Members
from paceline.exchange.sums import SharedSums
from paceline.exchange.together import Together
from paceline.memory.layout import FlatLayout
from paceline.memory.model_arena import ModelArena, Sizes


class Replicas:
    """As many replicas as threads, on one board and one arena."""

    def __init__(self, count: int) -> None:
        layout = FlatLayout.plan([("weight", torch.zeros(4), 0)], owners=count)
        sizes = Sizes(count, (64,), scratch_bytes=4096, buffer_bytes=0)
        arena = ModelArena.create(layout, sizes)
        self.board = Board.create(count, supervised=True)
        self.sums = [SharedSums(Together(self.board, rank, timeout_s=10.0), arena) for rank in range(count)]

    def begin(self, op: int) -> None:
        for rank, sums in enumerate(self.sums):
            sums.begin(self.board.members(rank, op))

    def all_do(self, work: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.sums)) as threads:
            return list(threads.map(work, range(len(self.sums)), timeout=30))


def value(rank: int, number: int) -> torch.Tensor:
    return torch.tensor([1.0 / (rank + 1), number / 3, 10.0**rank], dtype=torch.float64)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_everybody_gets_the_same_bits_however_many_sums_follow_one_another(count: int) -> None:
    replicas = Replicas(count)
    for op in (1, 2, 3):
        replicas.begin(op)
        sums = replicas.all_do(
            lambda rank: [replicas.sums[rank].sum(value(rank, number), range(count)) for number in range(7)]
        )
        for number in range(7):
            expected = value(0, number)
            for rank in range(1, count):
                expected += value(rank, number)
            assert all(torch.equal(of_rank[number], expected) for of_rank in sums)


def test_one_that_is_left_out_of_later_sums_still_reads_the_one_it_took_part_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A last micro-batch may have no samples for some replicas. They need not have read the sum before it yet."""
    replicas = Replicas(3)
    go_on = threading.Event()
    await_posts = Board.await_posts

    def await_and_dawdle(board: Board, members: Members, among: Sequence[int], *args: Any) -> None:
        await_posts(board, members, among, *args)
        if members.replica == 2:
            go_on.wait(5)

    def work(rank: int) -> torch.Tensor:
        first = replicas.sums[rank].sum(value(rank, 0), [0, 1, 2])
        if rank < 2:
            for number in (1, 2):
                replicas.sums[rank].sum(value(rank, number), [0, 1])
        if rank == 0:
            go_on.set()
        return first

    monkeypatch.setattr(Board, "await_posts", await_and_dawdle)
    replicas.begin(op=1)
    first, *others = replicas.all_do(work)
    assert all(torch.equal(other, first) for other in others)
