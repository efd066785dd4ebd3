"""Collectives of all ranks of a group, by rounds through shared memory.

An element is copied into the space once, and out of it by those who need it. A large all-reduce goes in two halves:
each rank adds up its part of every chunk, and puts the sum where its own contribution was.

Reductions add in the order of the ranks, in float32 for the short floats, and give the same bits to all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from paceline.torch_group.errors import CallError
from paceline.torch_group.reductions import Reduction
from paceline.torch_group.rounds import SLOT_BYTES, Rounds

SMALL_BYTES = 64 << 10  # up to here everybody adds up everything


class Collectives(Rounds):
    """What this rank does together with all others. All tensors are flat and contiguous here."""

    def barrier(self) -> None:
        self._begin("barrier", torch.uint8, [])
        self._next_round()
        self._post_and_await(self._all)

    def all_reduce(self, flat: torch.Tensor, reduce: Reduction) -> None:
        """`flat` becomes the reduction over all ranks."""
        self._begin("all_reduce", flat.dtype, [flat.numel()], op=reduce.code)
        for start, stop in self._in_rounds(flat.numel(), SLOT_BYTES // flat.itemsize):
            chunk = flat[start:stop]
            self._leave(chunk)
            self._post_and_await(self._all)
            if chunk.nbytes <= SMALL_BYTES:
                reduce([self._slot(rank, 0, stop - start, flat.dtype) for rank in self._all], chunk)
                continue
            bounds = [(stop - start) * rank // self.count for rank in range(self.count + 1)]
            low, length = bounds[self.rank], bounds[self.rank + 1] - bounds[self.rank]
            own = chunk[low : low + length]
            reduce([self._slot(rank, low, length, flat.dtype) for rank in self._all], own)
            self._leave(own, low)  # only this rank reads that part of a slot
            self._post()
            self._await(self._all, self._number)
            for rank in self._others:
                low, high = bounds[rank], bounds[rank + 1]
                chunk[low:high].copy_(self._slot(rank, low, high - low, flat.dtype))

    def reduce(self, flat: torch.Tensor, root: int, reduce: Reduction) -> None:
        """`flat` of the root becomes the reduction."""
        self._begin("reduce", flat.dtype, [flat.numel()], root, reduce.code)
        for start, stop in self._in_rounds(flat.numel(), SLOT_BYTES // flat.itemsize):
            if self.rank != root:
                self._leave(flat[start:stop])
                self._post_and_await([])
                continue
            self._post_and_await(self._all)
            found = [self._slot(rank, 0, stop - start, flat.dtype) for rank in self._all]
            found[root] = flat[start:stop].clone()
            reduce(found, flat[start:stop])

    def reduce_scatter(self, parts: Sequence[torch.Tensor], into: torch.Tensor, reduce: Reduction) -> None:
        """Everybody has all parts; `into` becomes the reduction of this rank's."""
        lengths = [part.numel() for part in parts]
        self._begin("reduce_scatter", into.dtype, lengths, op=reduce.code)
        room = SLOT_BYTES // into.itemsize // self.count
        for start, stop in self._in_rounds(max(lengths), room):
            for rank in self._others:
                self._leave(parts[rank][start:stop], rank * room)
            self._post_and_await(self._all)
            own = parts[self.rank][start:stop]
            if own.untyped_storage().data_ptr() == into.untyped_storage().data_ptr():
                own = own.clone()  # a part of the input may be the output
            found = [self._slot(rank, self.rank * room, own.numel(), into.dtype) for rank in self._all]
            found[self.rank] = own
            reduce(found, into[start:stop])

    def all_gather(self, flat: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
        """`into[r]` becomes rank r's; they may differ in length."""
        lengths = [part.numel() for part in into]
        self._begin("all_gather", flat.dtype, lengths)
        for start, stop in self._in_rounds(max(lengths), SLOT_BYTES // flat.itemsize):
            self._leave(flat[start:stop])
            self._post_and_await(self._all)
            for rank in self._others:
                there = into[rank][start:stop]
                there.copy_(self._slot(rank, 0, there.numel(), flat.dtype))
        into[self.rank].copy_(flat)

    def gather(self, flat: torch.Tensor, into: Sequence[torch.Tensor], root: int) -> None:
        """`into` of the root, as in all_gather; all of one length. Empty at the others."""
        self._begin("gather", flat.dtype, [flat.numel()], root)
        for start, stop in self._in_rounds(flat.numel(), SLOT_BYTES // flat.itemsize):
            if self.rank != root:
                self._leave(flat[start:stop])
                self._post_and_await([])
                continue
            self._post_and_await(self._all)
            for rank in self._others:
                into[rank][start:stop].copy_(self._slot(rank, 0, stop - start, flat.dtype))
        if self.rank == root:
            into[root].copy_(flat)

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """`flat` becomes the root's."""
        self._begin("broadcast", flat.dtype, [flat.numel()], root)
        for start, stop in self._in_rounds(flat.numel(), SLOT_BYTES // flat.itemsize):
            if self.rank == root:
                self._leave(flat[start:stop])
                self._post_and_await([])
            else:
                self._post_and_await([root])
                flat[start:stop].copy_(self._slot(root, 0, stop - start, flat.dtype))

    def scatter(self, parts: Sequence[torch.Tensor], into: torch.Tensor, root: int) -> None:
        """`into` becomes this rank's of the root's parts, all of one length. Empty at the others."""
        self._begin("scatter", into.dtype, [into.numel()], root)
        room = SLOT_BYTES // into.itemsize // self.count
        for start, stop in self._in_rounds(into.numel(), room):
            if self.rank == root:
                for rank in self._others:
                    self._leave(parts[rank][start:stop], rank * room)
                self._post_and_await([])
            else:
                self._post_and_await([root])
                into[start:stop].copy_(self._slot(root, self.rank * room, stop - start, into.dtype))
        if self.rank == root:
            into.copy_(parts[root])

    def all_to_all(self, parts: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        """`into[r]` becomes what rank r has as its part for this rank; any lengths."""
        dtype, count = parts[0].dtype, self.count
        self._begin("all_to_all", dtype, [])
        self._next_round()
        both = torch.tensor([[part.numel() for part in side] for side in (parts, into)])
        self._leave(both.view(-1))
        self._post_and_await(self._all)
        found = [self._slot(rank, 0, 2 * count, torch.int64).view(2, count) for rank in self._all]
        sent = torch.stack([lengths[0] for lengths in found])
        taken = torch.stack([lengths[1] for lengths in found], 1)
        for source, target in (sent != taken).nonzero().tolist()[:1]:  # the same on all ranks
            raise CallError(
                f"rank {source} sends {int(sent[source, target])} elements to rank {target}, which has room for "
                f"{int(taken[source, target])}: the sizes of all_to_all must agree"
            )
        room = SLOT_BYTES // dtype.itemsize // count
        for start, stop in self._in_rounds(int(sent.max()), room):
            for rank in self._others:
                self._leave(parts[rank][start:stop], rank * room)
            self._post_and_await(self._all)
            for rank in self._others:
                there = into[rank][start:stop]
                there.copy_(self._slot(rank, self.rank * room, there.numel(), dtype))
        into[self.rank].copy_(parts[self.rank])

    def _in_rounds(self, length: int, room: int) -> Iterator[tuple[int, int]]:
        """A round for each part of at most `room` elements, and its bounds; one for what is empty, too."""
        for start in range(0, length or 1, room):
            self._next_round()
            yield start, min(start + room, length)

    def _leave(self, piece: torch.Tensor, at: int = 0) -> None:
        """Have these elements in this rank's slot of the round, for others to read."""
        self._slot(self.rank, at, piece.numel(), piece.dtype).copy_(piece)
