"""Tensors as bytes, and names for them in messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

Entry = tuple[str, str, tuple[int, ...]]  # name, type, shape

OTHER_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}


def type_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def entries_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[Entry]:
    return [(name, type_name(tensor), tuple(tensor.shape)) for name, tensor in tensors]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def named_tensors(entries: Sequence[Entry], body: bytearray) -> dict[str, torch.Tensor]:
    """Return tensors with their names, from the bytes of all of them."""
    found, offset = {}, 0
    for name, dtype, shape in entries:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        bytes_of(tensor)[:] = memoryview(body)[offset : offset + tensor.nbytes]
        found[name] = tensor
        offset += tensor.nbytes
    return found
