"""Small sums over the replicas of one host, through shared memory.

Every participant leaves its values in its own scratch space, posts a number on the board, and adds up what the
others left, in the order of their ranks: all get the same bits. Two scratch spaces take turns, so nobody
overwrites what a slower one still reads: to be two sums ahead, one would have needed its contribution in between.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.exchange.board import COLLECTIVE_BITS, Members, Word
from paceline.exchange.together import Together
from paceline.memory import ModelArena


class SharedSums:
    """Sums within one op. A death raises `MemberLost` in all who wait for the dead."""

    def __init__(self, together: Together, arena: ModelArena) -> None:
        self._board = together.board
        self._arena = arena
        self._replica = together.replica
        self._timeout_s = together.timeout_s
        self._members = Members(0, 0, (), together.replica)
        self._number = 0

    def begin(self, members: Members) -> None:
        """A try of an op begins; its sums are counted from 0."""
        self._members = members
        self._number = 0

    def sum(self, values: torch.Tensor, among: Sequence[int]) -> torch.Tensor:
        """The sum of `values` over the replicas `among`, which all call this."""
        members, number = self._members, self._number
        parity = (members.op + number) % 2
        self._number += 1
        self._arena.scratch(parity, self._replica, values).copy_(values.reshape(-1))
        self._board.set(self._replica, Word.POSTED, members.tag << COLLECTIVE_BITS | number)
        self._board.await_posts(members, among, number, self._timeout_s)
        total = self._arena.scratch(parity, among[0], values).clone()
        for other in among[1:]:
            total += self._arena.scratch(parity, other, values)
        return total.view(values.shape)
