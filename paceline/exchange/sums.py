"""Small sums over the replicas of one host, through shared memory.

Every participant leaves its values in its own scratch space, posts a number on the board, and adds up what the
others left, in the order of their ranks: all get the same bits. Two scratch spaces take turns, so nobody
overwrites what a slower one still reads, as long as all take part in all sums. When some do not, a replica first makes
sure that the readers of what it left there before have finished.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.errors import PacelineError
from paceline.exchange.board import COLLECTIVE_BITS
from paceline.exchange.members import Members
from paceline.exchange.together import Together
from paceline.exchange.words import Phase, Word
from paceline.memory.model_arena import ModelArena


class SharedSums:
    """Sums within one op. A death raises `MemberLost` in all who wait for the dead."""

    def __init__(self, together: Together, arena: ModelArena) -> None:
        self._board = together.board
        self._arena = arena
        self._replica = together.replica
        self._timeout_s = together.timeout_s
        self._members = Members(0, 0, (), together.replica)
        self._number = 0
        self._phase = Phase.AWAITING_STATISTICS
        self._last: dict[int, tuple[int, Sequence[int]]] = {}  # by scratch space: the last sum there, and who read it

    def begin(self, members: Members, phase: Phase = Phase.AWAITING_STATISTICS) -> None:
        """A try of an op begins; its sums are counted from 0. `phase`: what somebody does who waits for others."""
        self._members, self._phase = members, phase
        self._number = 0

    def sum(self, values: torch.Tensor, among: Sequence[int]) -> torch.Tensor:
        """The sum of `values` over the replicas `among`, which all call this."""
        members, number = self._members, self._number
        parity = (members.op + number) % 2
        self._number += 1
        if values.nbytes > self._arena.scratch_bytes:
            raise PacelineError(
                f"{values.numel()} numbers were to be summed at once: at most {self._arena.scratch_bytes // 8} can be"
            )
        self._await_readers(parity)
        self._arena.scratch(parity, self._replica, values).copy_(values.reshape(-1))
        post = members.tag << COLLECTIVE_BITS | number
        self._last[parity] = (post, among)
        self._board.set(self._replica, Word.POSTED, post)
        self._board.await_posts(members, among, number, self._timeout_s, self._phase)
        first, *others = (self._arena.scratch(parity, other, values) for other in among)
        total = first + others[0] if others else first.clone()
        for other in others[1:]:
            total += other
        self._board.set(self._replica, Word.READ, post)
        return total.view(values.shape).to(values.device)

    def _await_readers(self, parity: int) -> None:
        """Until nobody reads any more what this replica left there before: who is dead, has gone on to another op or
        try, or has finished that sum."""
        if parity not in self._last:
            return
        board = self._board
        post, readers = self._last[parity]

        def ready() -> bool:
            if all(
                board.get(reader, Word.READ) >= post
                or board.get(reader, Word.WORKING) > post >> COLLECTIVE_BITS
                or not board.alive(reader)
                for reader in readers
            ):
                return True
            board.check_view(self._members)
            return False

        board.wait(self._replica, Phase.AWAITING_STATISTICS, ready, self._timeout_s)
