"""Tensors as bytes, and names for them in messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from paceline.central.shards import DTYPES
from paceline.errors import PacelineError

Entry = tuple[str, str, tuple[int, ...]]  # name, type, shape

OTHER_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}
ALL_TYPES = {**DTYPES, **OTHER_TYPES}


def type_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def entries_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[Entry]:
    return [(name, type_name(tensor), tuple(tensor.shape)) for name, tensor in tensors]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def empty_tensors(entries: Sequence[Entry], size: int) -> dict[str, torch.Tensor]:
    """Return memory for tensors with their names, which have so many bytes together."""
    total = 0
    for name, dtype, shape in entries:
        if dtype not in ALL_TYPES or min(shape, default=0) < 0:
            raise PacelineError(f"{name!r} of type {dtype!r} and shape {shape} is no tensor")
        total += math.prod(shape) * ALL_TYPES[dtype].itemsize
    if total != size or len({name for name, _, _ in entries}) != len(entries):
        raise PacelineError(f"{len(entries)} tensors of {total:,} bytes are not in {size:,} bytes")
    return {name: torch.empty(shape, dtype=ALL_TYPES[dtype]) for name, dtype, shape in entries}


def named_tensors(entries: Sequence[Entry], body: bytearray) -> dict[str, torch.Tensor]:
    """Return tensors with their names, from the bytes of all of them."""
    found, offset = empty_tensors(entries, len(body)), 0
    for tensor in found.values():
        bytes_of(tensor)[:] = memoryview(body)[offset : offset + tensor.nbytes]
        offset += tensor.nbytes
    return found
