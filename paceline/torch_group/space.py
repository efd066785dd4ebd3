"""Collectives through a space in shared memory that all ranks of a group see.

Every rank has a slot of the space, which it alone writes. A collective is a few rounds:

    rank 0   write own slot ─▶ post ─▶ wait for those it reads from ─▶ read their slots
    rank 1   write own slot ──▶ post ─▶ …

What is longer than a slot takes several rounds. Slots take turns: a round uses the one half of the space, the next the
other. Whoever posts has finished reading all earlier rounds; so a rank may write again what it wrote two rounds ago as
soon as all have posted the last one.

An element is copied into the space once, and out of it by those who need it. A large all-reduce goes in two halves:
each rank adds up its part of every chunk, and puts the sum where its own contribution was.

Reductions add in the order of the ranks, in float32 for the short floats, and give the same bits to all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from paceline.errors import PacelineError
from paceline.torch_group.flat import Reduce
from paceline.torch_group.rank_group import RankGroup

SLOT_BYTES = 8 << 20
SMALL_BYTES = 64 << 10  # up to here everybody adds up everything
HEAD_WORDS = 8  # of a slot: which collective this is, its size; a line of the cache
TURNS = 2

KINDS = (
    "barrier",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "all_to_all",
)


def space_bytes(count: int) -> int:
    return TURNS * count * (SLOT_BYTES + HEAD_WORDS * 8)


class Space:
    """This rank's view of the space. All tensors are flat and contiguous here."""

    def __init__(self, company: RankGroup, segment: int) -> None:
        """`segment`: which of the company's."""
        self._company = company
        self.rank = company.rank
        self.count = company.count
        self._others = [rank for rank in range(self.count) if rank != self.rank]
        arena = company.arenas[segment]
        words = TURNS * self.count * HEAD_WORDS
        self._heads = arena.view(0, torch.int64, [words]).numpy().data
        shape = [TURNS, self.count, SLOT_BYTES]
        self._slots = [list(turn) for turn in arena.view(words * 8, torch.uint8, shape)]
        self._number = 0  # of the last post
        self._first = 0  # post of the round before
        self._round = 0
        self._call = (0, 0)

    # ── rounds ───────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, kind: str, size: int) -> None:
        """A collective; all ranks must begin the same, of the same size."""
        self._call = KINDS.index(kind), size

    def _next_round(self) -> None:
        """From here on this rank may write its slot."""
        self._await(range(self.count), self._first)
        self._round += 1
        at = (self._round % TURNS * self.count + self.rank) * HEAD_WORDS
        self._heads[at], self._heads[at + 1] = self._call

    def _post(self) -> None:
        """What this rank has written may be read."""
        self._number += 1
        self._company.announce(self._number)

    def _post_and_await(self, ranks: Iterable[int]) -> None:
        """The usual middle of a round."""
        self._first = self._number + 1
        self._post()
        self._await(ranks, self._first)
        for rank in ranks:
            at = (self._round % TURNS * self.count + rank) * HEAD_WORDS
            theirs = self._heads[at], self._heads[at + 1]
            if theirs != self._call:
                raise PacelineError(
                    f"rank {self.rank} calls {_words(self._call)} while rank {rank} calls {_words(theirs)}: "
                    "every rank of a group must make the same calls in the same order"
                )

    def _await(self, ranks: Iterable[int], number: int) -> None:
        posted = self._company.number_of
        pending = [rank for rank in ranks if posted(rank) < number]
        if not pending:
            return

        def ready() -> bool:
            pending[:] = [rank for rank in pending if posted(rank) < number]
            return not pending

        self._company.wait(ready, lambda: list(pending), KINDS[self._call[0]])

    def _slot(self, rank: int, start: int, length: int, dtype: torch.dtype) -> torch.Tensor:
        """`length` elements of a slot of this round, the first of which is number `start`."""
        size = dtype.itemsize
        slot: torch.Tensor = self._slots[self._round % TURNS][rank]
        return slot[start * size : (start + length) * size].view(dtype)

    # ── collectives ──────────────────────────────────────────────────────────────────────────────────────

    def barrier(self) -> None:
        self._begin("barrier", 0)
        self._next_round()
        self._post_and_await(range(self.count))

    def all_reduce(self, flat: torch.Tensor, reduce: Reduce) -> None:
        """`flat` becomes the reduction over all ranks."""
        self._begin("all_reduce", flat.nbytes)
        for start, stop in _chunks(flat.numel(), SLOT_BYTES // flat.itemsize):
            chunk = flat[start:stop]
            self._next_round()
            self._slot(self.rank, 0, stop - start, flat.dtype).copy_(chunk)
            self._post_and_await(range(self.count))
            if chunk.nbytes <= SMALL_BYTES:
                reduce([self._slot(rank, 0, stop - start, flat.dtype) for rank in range(self.count)], chunk)
                continue
            bounds = [(stop - start) * rank // self.count for rank in range(self.count + 1)]
            low, length = bounds[self.rank], bounds[self.rank + 1] - bounds[self.rank]
            own = chunk[low : low + length]
            reduce([self._slot(rank, low, length, flat.dtype) for rank in range(self.count)], own)
            self._slot(self.rank, low, length, flat.dtype).copy_(own)  # only this rank reads that part of a slot
            self._post()
            self._await(range(self.count), self._number)
            for rank in self._others:
                low, high = bounds[rank], bounds[rank + 1]
                chunk[low:high].copy_(self._slot(rank, low, high - low, flat.dtype))

    def reduce(self, flat: torch.Tensor, root: int, reduce: Reduce) -> None:
        """`flat` of the root becomes the reduction."""
        self._begin("reduce", flat.nbytes)
        for start, stop in _chunks(flat.numel(), SLOT_BYTES // flat.itemsize):
            self._next_round()
            if self.rank != root:
                self._slot(self.rank, 0, stop - start, flat.dtype).copy_(flat[start:stop])
                self._post_and_await([])
                continue
            self._post_and_await(range(self.count))
            found = [self._slot(rank, 0, stop - start, flat.dtype) for rank in range(self.count)]
            found[root] = flat[start:stop].clone()
            reduce(found, flat[start:stop])

    def reduce_scatter(self, parts: Sequence[torch.Tensor], into: torch.Tensor, reduce: Reduce) -> None:
        """Everybody has all parts; `into` becomes the reduction of this rank's."""
        longest = max(part.numel() for part in parts)
        self._begin("reduce_scatter", longest * into.itemsize)
        room = SLOT_BYTES // into.itemsize // self.count
        for start, stop in _chunks(longest, room):
            self._next_round()
            for rank in self._others:
                piece = parts[rank][start:stop]
                self._slot(self.rank, rank * room, piece.numel(), into.dtype).copy_(piece)
            self._post_and_await(range(self.count))
            own = parts[self.rank][start:stop]
            if own.untyped_storage().data_ptr() == into.untyped_storage().data_ptr():
                own = own.clone()  # a part of the input may be the output
            found = [self._slot(rank, self.rank * room, own.numel(), into.dtype) for rank in range(self.count)]
            found[self.rank] = own
            reduce(found, into[start:stop])

    def all_gather(self, flat: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
        """`into[r]` becomes rank r's; they may differ in length."""
        longest = max(part.numel() for part in into)
        self._begin("all_gather", longest * flat.itemsize)
        for start, stop in _chunks(longest, SLOT_BYTES // flat.itemsize):
            self._next_round()
            piece = flat[start:stop]
            self._slot(self.rank, 0, piece.numel(), flat.dtype).copy_(piece)
            self._post_and_await(range(self.count))
            for rank in self._others:
                there = into[rank][start:stop]
                there.copy_(self._slot(rank, 0, there.numel(), flat.dtype))
        into[self.rank].copy_(flat)

    def gather(self, flat: torch.Tensor, into: Sequence[torch.Tensor], root: int) -> None:
        """`into` of the root, as in all_gather; all of one length. Empty at the others."""
        self._begin("gather", flat.nbytes)
        for start, stop in _chunks(flat.numel(), SLOT_BYTES // flat.itemsize):
            self._next_round()
            if self.rank != root:
                self._slot(self.rank, 0, stop - start, flat.dtype).copy_(flat[start:stop])
                self._post_and_await([])
                continue
            self._post_and_await(range(self.count))
            for rank in self._others:
                into[rank][start:stop].copy_(self._slot(rank, 0, stop - start, flat.dtype))
        if self.rank == root:
            into[root].copy_(flat)

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """`flat` becomes the root's."""
        self._begin("broadcast", flat.nbytes)
        for start, stop in _chunks(flat.numel(), SLOT_BYTES // flat.itemsize):
            self._next_round()
            slot = self._slot(root, 0, stop - start, flat.dtype)
            if self.rank == root:
                slot.copy_(flat[start:stop])
                self._post_and_await([])
            else:
                self._post_and_await([root])
                flat[start:stop].copy_(slot)

    def scatter(self, parts: Sequence[torch.Tensor], into: torch.Tensor, root: int) -> None:
        """`into` becomes this rank's of the root's parts, all of one length. Empty at the others."""
        self._begin("scatter", into.nbytes)
        room = SLOT_BYTES // into.itemsize // self.count
        for start, stop in _chunks(into.numel(), room):
            self._next_round()
            if self.rank == root:
                for rank in self._others:
                    self._slot(root, rank * room, stop - start, into.dtype).copy_(parts[rank][start:stop])
                self._post_and_await([])
            else:
                self._post_and_await([root])
                into[start:stop].copy_(self._slot(root, self.rank * room, stop - start, into.dtype))
        if self.rank == root:
            into.copy_(parts[root])

    def all_to_all(self, parts: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        """`into[r]` becomes what rank r has as its part for this rank; any lengths."""
        self._begin("all_to_all", 0)
        dtype, count = parts[0].dtype, self.count
        lengths = torch.tensor([part.numel() for part in parts])
        self._next_round()
        self._slot(self.rank, 0, count, torch.int64).copy_(lengths)
        self._post_and_await(range(count))
        lengths = torch.stack([self._slot(rank, 0, count, torch.int64) for rank in range(count)])
        for rank in range(count):
            if lengths[rank, self.rank] != into[rank].numel():
                raise PacelineError(
                    f"rank {rank} sends {int(lengths[rank, self.rank])} elements to rank {self.rank}, which has room "
                    f"for {into[rank].numel()}: the sizes of all_to_all must agree"
                )
        room = SLOT_BYTES // dtype.itemsize // count
        for start, stop in _chunks(int(lengths.max()), room):
            self._next_round()
            for rank in self._others:
                piece = parts[rank][start:stop]
                self._slot(self.rank, rank * room, piece.numel(), dtype).copy_(piece)
            self._post_and_await(range(count))
            for rank in self._others:
                there = into[rank][start:stop]
                there.copy_(self._slot(rank, self.rank * room, there.numel(), dtype))
        into[self.rank].copy_(parts[self.rank])


def _chunks(length: int, room: int) -> list[tuple[int, int]]:
    """At least one: also what is empty is done together.

    >>> _chunks(7, 3), _chunks(0, 3)
    ([(0, 3), (3, 6), (6, 7)], [(0, 0)])
    """
    return [(start, min(start + room, length)) for start in range(0, length, room)] or [(0, 0)]


def _words(call: tuple[int, int]) -> str:
    kind, size = call
    return f"{KINDS[kind]} of {size} bytes" if size else KINDS[kind]
