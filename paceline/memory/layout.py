"""Where every tensor lies, and how the bytes are cut.

    slot     one parameter's place in the flat buffer (64-byte aligned)
    piece    a run of one parameter's elements, at most a chunk long: what the optimizer sees as a "parameter"
    chunk    neighbouring pieces of one type, about two megabytes: the unit of an owner's work and of its undo
    bucket   neighbouring chunks that travel together over a network
    shard    the chunks of one owner

Trained parameters come first, in reverse order of registration, which is about the order in which backward
finishes them: the first bucket is complete while backward still runs. Frozen ones follow; they are shared, but
have no gradient, no state and no owner.

    ┌─ bucket 0 ──────────────┬─ bucket 1 ──────────────┬ frozen ┐
    │ chunk 0 │ chunk 1 │ …   │ …                       │        │
    └ owner 0 ┴ owner 1 ──────┴ owner 0 ┴ owner 1 ──────┴────────┘
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

ALIGNMENT = 64
CHUNK_BYTES = 1 << 21  # half of it and the Python around a chunk shows, twice of it and the cache does not hold it
SMALLEST_CHUNK_BYTES = 1 << 16


def aligned(offset: int) -> int:
    """The next multiple of the alignment.

    >>> aligned(0), aligned(1), aligned(64)
    (0, 64, 64)
    """
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Slot:
    """One parameter's place. `group` is its optimizer group; None: frozen, or not given to the optimizer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int | None
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def describe(self) -> list[Any]:
        """As plain data, so that replicas can compare their models."""
        return [self.name, list(self.shape), str(self.dtype), self.group]


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of slot number `slot`."""

    slot: int
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Chunk:
    """Bytes [start, stop) of the flat buffer, all of one type, and the pieces that lie there."""

    start: int
    stop: int
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """The whole plan: slots, the chunks of the trained ones, and the sizes."""

    slots: tuple[Slot, ...]
    chunks: tuple[Chunk, ...]
    bytes: int
    trained_bytes: int

    @classmethod
    def plan(
        cls,
        parameters: Sequence[tuple[str, torch.Tensor, int | None]],
        *,
        owners: int,
        whole_tensors: bool = False,
        one_chunk: bool = False,
    ) -> FlatLayout:
        """Place `(name, tensor, group)` in the order of registration.

        `whole_tensors`: never cut a tensor, for optimizers that must see it whole. `one_chunk`: have all of one type in
        one chunk, for those that must see all of them.
        """
        trained = [entry for entry in reversed(parameters) if entry[2] is not None]
        frozen = [entry for entry in parameters if entry[2] is None]
        slots: list[Slot] = []
        offset = trained_bytes = 0
        for name, tensor, group in [*trained, *frozen]:
            slots.append(Slot(name, tuple(tensor.shape), tensor.dtype, group, offset))
            offset = aligned(offset + slots[-1].bytes)
            if group is not None:
                trained_bytes = offset
        # Small models are cut finer, so that every owner has something to do.
        chunk_bytes = min(CHUNK_BYTES, max(SMALLEST_CHUNK_BYTES, trained_bytes // (4 * owners)))
        chunks = _cut(slots[: len(trained)], trained_bytes if one_chunk else chunk_bytes, whole_tensors)
        return cls(tuple(slots), tuple(chunks), offset, trained_bytes)

    def describe(self) -> list[list[Any]]:
        return [slot.describe() for slot in self.slots]


def _cut(slots: Sequence[Slot], chunk_bytes: int, whole_tensors: bool) -> list[Chunk]:
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    start = stop = 0

    def close() -> None:
        if pieces:
            chunks.append(Chunk(start, stop, slots[pieces[0].slot].dtype, tuple(pieces)))
            pieces.clear()

    for number, slot in enumerate(slots):
        if slot.elements == 0:
            continue
        parts = 1 if whole_tensors else -(-slot.bytes // chunk_bytes)
        # Cut on multiples of the alignment, so that every piece starts aligned.
        step = -(-slot.elements // parts)
        step = aligned(step * slot.dtype.itemsize) // slot.dtype.itemsize
        for first in range(0, slot.elements, step):
            last = min(first + step, slot.elements)
            begin = slot.offset + first * slot.dtype.itemsize
            end = slot.offset + last * slot.dtype.itemsize
            if pieces and (end - start > chunk_bytes or slot.dtype != slots[pieces[0].slot].dtype):
                close()
            if not pieces:
                start = begin
            pieces.append(Piece(number, first, last))
            stop = end
    close()
    return chunks


def assign(chunks: Sequence[Chunk], owners: int, bucket_bytes: int | None = None) -> list[list[list[int]]]:
    """Which chunks each owner has: `assign(...)[owner][bucket]` lists chunk numbers, neighbouring ones.

    Every bucket is cut among all owners by bytes. Without `bucket_bytes` there is one bucket.
    """
    buckets: list[list[int]] = []
    filled = 0
    for number, chunk in enumerate(chunks):
        if not buckets or (bucket_bytes is not None and filled >= bucket_bytes):
            buckets.append([])
            filled = 0
        buckets[-1].append(number)
        filled += chunk.bytes
    shards: list[list[list[int]]] = [[[] for _ in buckets] for _ in range(owners)]
    for index, bucket in enumerate(buckets):
        total = sum(chunks[number].bytes for number in bucket)
        before = 0
        for number in bucket:
            middle = before + chunks[number].bytes / 2
            shards[min(owners - 1, int(middle * owners / total))][index].append(number)
            before += chunks[number].bytes
    return shards
