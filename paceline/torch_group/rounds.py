"""Rounds that all ranks of a group take together, through a space in shared memory that all of them see.

Every rank has a slot of the space, which it alone writes. A collective is a few rounds:

    rank 0   write own slot ─▶ post ─▶ wait for those it reads from ─▶ read their slots
    rank 1   write own slot ──▶ post ─▶ …

What is longer than a slot takes several rounds. Slots take turns: a round uses the one half of the space, the next the
other. Whoever posts has finished reading all earlier rounds; so a rank may write again what it wrote two rounds ago as
soon as all have posted the last one.

A slot has a head that says which call this is. In the first round of a call everybody reads the heads of all: if they
differ, all ranks raise, in the same round, and the group can go on. A rank that must refuse its own call says so in its
head. A rank that gives up later, because another is late or dead, says so in place of its next post.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.distributed import ReduceOp

from paceline.exchange.mailboxes import DTYPE_NUMBERS, DTYPES
from paceline.torch_group.errors import CallError, GroupBroken, RankDied, RankLate
from paceline.torch_group.flat_tensors import outside_inference
from paceline.torch_group.rank_group import RankGroup

SLOT_BYTES = 8 << 20
HEAD_WORDS = 8  # of a slot: the words of a call; a line of the cache
TURNS = 2
GAVE_UP = -1  # in place of the number of a post

REFUSED = "a call that was refused"
_CALLS = "barrier all_reduce reduce_scatter all_gather broadcast reduce scatter gather all_to_all"
KINDS = (*_CALLS.split(), REFUSED)


def space_bytes(count: int) -> int:
    """The memory that the collectives of so many ranks need."""
    return (TURNS + 1) * count * HEAD_WORDS * 8 + TURNS * count * SLOT_BYTES


class Rounds:
    """This rank's part in them."""

    def __init__(self, ranks: RankGroup, segment: int) -> None:
        """`segment`: which of the group's is the space."""
        self._ranks = ranks
        self.rank = ranks.rank
        self.count = ranks.count
        self.limit_s: float | None = None  # of the call that comes next; None: that of the group
        self.rounds = 0  # so far
        self._all = range(self.count)
        self._others = [rank for rank in self._all if rank != self.rank]
        arena = ranks.arenas[segment]
        words = (TURNS + 1) * self.count * HEAD_WORDS
        self._heads = arena.view(0, torch.int64, [words]).numpy().data
        shape = [TURNS, self.count, SLOT_BYTES]
        self._bytes = arena.view(words * 8, torch.uint8, shape)
        self._slots: dict[torch.dtype, list[list[torch.Tensor]]] = {}  # by type, turn and rank
        self._number = 0  # of the last post
        self._first = 0  # post of the round before
        self._call = (0, 0, 0)
        self._agreed = True  # whether all ranks are known to make this call
        self._broken = ""

    # ── a round ──────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, kind: str, dtype: torch.dtype, lengths: Sequence[int], root: int = 0, op: int = 0) -> None:
        """A collective; all ranks must begin the same."""
        if not 0 <= root < self.count:
            raise CallError(f"{kind} has the root {root}: give a rank of the group, from 0 to {self.count - 1}")
        words = KINDS.index(kind) | DTYPE_NUMBERS[dtype] << 8 | op << 16 | root << 32
        self._call = words, sum(lengths) * dtype.itemsize, hash(tuple(lengths))
        self._agreed = False

    def _next_round(self) -> None:
        """From here on this rank may write its slot."""
        if self._broken:
            raise GroupBroken(f"a process group cannot be used any more since an earlier call failed: {self._broken}")
        self._await(self._all, self._first)
        self.rounds += 1
        at = (self.rounds % TURNS * self.count + self.rank) * HEAD_WORDS
        self._heads[at], self._heads[at + 1], self._heads[at + 2] = self._call

    def _post(self) -> None:
        """What this rank has written may be read."""
        self._number += 1
        self._ranks.announce(self._number)

    def _post_and_await(self, ranks: Iterable[int]) -> None:
        """The usual middle of a round."""
        self._first = self._number + 1
        self._post()
        if self._agreed:
            self._await(ranks, self._first)
            return
        self._await(self._all, self._first)
        for rank in self._others:
            at = (self.rounds % TURNS * self.count + rank) * HEAD_WORDS
            theirs = self._heads[at], self._heads[at + 1], self._heads[at + 2]
            if theirs[0] == KINDS.index(REFUSED):
                raise CallError(f"rank {rank} has refused its part in {_words(self._call)}: its own error says why")
            if theirs != self._call:
                raise CallError(
                    f"rank {self.rank} calls {_words(self._call)} while rank {rank} calls {_words(theirs)}: "
                    "every rank of a group must make the same calls in the same order"
                )
        self._agreed = True

    def _await(self, ranks: Iterable[int], number: int) -> None:
        posted = self._ranks.number_of
        pending = [rank for rank in ranks if posted(rank) < number]
        if not pending:
            return

        def ready() -> bool:
            pending[:] = [rank for rank in pending if posted(rank) < number]
            for rank in pending:
                if posted(rank) == GAVE_UP:
                    raise GroupBroken(f"rank {self.rank} waits for rank {rank}, which has given up in an earlier call")
            return not pending

        self._ranks.wait(ready, lambda: list(pending), self._kind, self.limit_s)

    @property
    def _kind(self) -> str:
        return KINDS[self._call[0] & 0xFF]

    def _slot(self, rank: int, start: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        """`length` elements of a slot of this round, the first of which is number `start`."""
        slots = self._slots.get(dtype)
        if slots is None:
            with outside_inference():  # they are for later calls too
                slots = self._slots[dtype] = [list(turn) for turn in self._bytes.view(dtype)]
        return slots[self.rounds % TURNS][rank][start : start + length]

    # ── what fails ───────────────────────────────────────────────────────────────────────────────────────

    def failed(self, before: int, error: BaseException) -> None:
        """A call that began after `before` rounds has failed on this rank: tell those who wait for it."""
        if isinstance(error, CallError) and self.rounds > before:
            return  # all ranks have seen it in the same round
        if (
            isinstance(error, (RankLate, RankDied, GroupBroken))
            or self.rounds > before
            or not isinstance(error, Exception)
        ):
            self._give_up(error)
            return
        try:  # what cannot be on this rank alone, before it has told anybody
            self._call = KINDS.index(REFUSED), 0, 0
            self._next_round()
            self._first = self._number + 1
            self._post()
        except (RankLate, RankDied, GroupBroken) as late:
            self._give_up(late)

    def _give_up(self, error: BaseException) -> None:
        self._broken = self._broken or str(error) or type(error).__name__
        self._ranks.announce(GAVE_UP)

    def monitored_barrier(self, limit_s: float) -> None:
        """Wait for everybody; whoever has not come in time is named. The rounds of other calls are not touched."""
        words = [(TURNS * self.count + rank) * HEAD_WORDS for rank in self._all]
        own = words[self.rank]
        # Those who called it in vain are ahead of those who did not call it.
        number = max(self._heads[own] + 1, *(self._heads[word] for word in words))
        self._heads[own] = number

        def pending() -> list[int]:
            return [rank for rank in self._all if self._heads[words[rank]] < number]

        try:
            self._ranks.wait(lambda: not pending(), pending, "monitored_barrier", limit_s)
        except RankLate:
            late = pending()
            raise RankLate(
                f"Rank {self.rank} timed out in monitoredBarrier after {limit_s:g} s: "
                f"Rank{'s' * (len(late) > 1)} {', '.join(map(str, late))} failed to pass monitoredBarrier"
            ) from None


def _words(call: tuple[int, int, int]) -> str:
    """What a call is, from its head."""
    words, size, _ = call
    kind = KINDS[words & 0xFF]
    if kind in ("barrier", REFUSED):
        return kind
    said = f"{kind} of {DTYPES[words >> 8 & 0xFF]}" + f" ({size} bytes" * (kind != "all_to_all")
    if kind in ("broadcast", "reduce", "scatter", "gather"):
        said += f", root {words >> 32}"
    if kind in ("all_reduce", "reduce", "reduce_scatter"):
        said += f", {ReduceOp.RedOpType(words >> 16 & 0xF).name}"
    return said + ")" * (kind != "all_to_all")
