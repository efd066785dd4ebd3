"""Values in memory that two processes share: requests to the process of a model, and its answers.

    ┌───────────────┬─────────────────────────────────────┬───────────────┬───────────────┬──
    │ 8 bytes: n    │ n bytes of msgpack: what the value  │ first tensor  │ second tensor │ …
    │               │ is made of, and where tensors lie   │ (64-aligned)  │ (64-aligned)  │
    └───────────────┴─────────────────────────────────────┴───────────────┴───────────────┴──

The kinds are fixed and there is no pickle. A tensor is torch's or NumPy's on either side: whoever only passes requests
on, as an HTTP server does, need not import torch. Who writes makes the memory larger where it has to be; who reads
copies out, so that the next value may be written at once. When there is something to read is said elsewhere.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from paceline.errors import PacelineError
from paceline.memory import segment

FIRST_BYTES = 1 << 16  # of such memory, when it is made
_ALIGN = 64
_LENGTH = struct.Struct("=Q")
_PLAIN = frozenset((type(None), bool, int, float, str))
_LISTS: dict[type, str] = {list: "list", tuple: "tuple"}
_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder()
_NAMES = {np.dtype(kind): np.dtype(kind).name for kind in "?bBhHiIlLqQefdFD"}  # to ask a type for its name takes long


class NotSharable(PacelineError):
    """A value has something in it that cannot go to another process; the text says what."""


@dataclass(frozen=True)
class StackedRows:
    """Arrays that arrive as one, below each other: of the same type, and with the same number of dims. Those that are
    smaller than others, in a dim but the first, arrive with zeros behind their numbers."""

    parts: Sequence[np.ndarray]

    @property
    def shape(self) -> list[int]:
        """Returns the shape of all of them together."""
        first = self.parts[0]
        if len(self.parts) == 1:
            return list(first.shape)
        sizes = [max(part.shape[at] for part in self.parts) for at in range(1, first.ndim)]
        return [sum(len(part) for part in self.parts), *sizes]


class SharedValues:
    """One value at a time, in memory behind a descriptor that both processes have."""

    def __init__(self, descriptor: int) -> None:
        """Takes over the descriptor of a segment."""
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._described, self._decoded = b"", None  # the value that was read last

    @classmethod
    def create(cls) -> SharedValues:
        """Makes new memory."""
        return cls(segment.make("values", FIRST_BYTES))

    def write(self, value: Any) -> int:
        """Writes a value in the place of the one before, and returns how many bytes it has."""
        found = _Description()
        try:
            description = _ENCODER.encode(found.of(value))
        except OverflowError:
            raise NotSharable("a number of more than 64 bits") from None
        start = _aligned(_LENGTH.size + len(description))
        size = start + found.size
        if size > len(self._memory):
            os.ftruncate(self.descriptor, max(size, 2 * len(self._memory)))
            self._map()
        _LENGTH.pack_into(self._memory, 0, len(description))
        self._memory[_LENGTH.size : _LENGTH.size + len(description)] = description
        for rows, shape, offset in found.arrays:
            if 0 in shape:
                continue
            room: np.ndarray = np.ndarray(shape, rows.parts[0].dtype, self._memory, start + offset)
            if len(rows.parts) == 1:
                np.copyto(room, rows.parts[0])
                continue
            first = 0
            for part in rows.parts:
                own = room[first : first + len(part)]
                if own.shape != part.shape:
                    own[...] = 0
                    own = own[tuple(map(slice, part.shape))]
                np.copyto(own, part)
                first += len(part)
        return size

    def read(self, size: int, *, torch_tensors: bool) -> Any:
        """Returns a copy of the value that was written, of so many bytes; its tensors are torch's or NumPy's."""
        if size > len(self._memory):
            self._map()
        (length,) = _LENGTH.unpack_from(self._memory, 0)
        described = self._memory[_LENGTH.size : _LENGTH.size + length]
        if described != self._described:  # mostly one value is like the one before, but for its numbers
            self._described, self._decoded = described, _DECODER.decode(described)
        tensor = partial(
            _torch_tensor if torch_tensors else _numpy_array, self._memory, _aligned(_LENGTH.size + length)
        )
        return _restored(self._decoded, tensor)

    def close(self) -> None:
        """Gives the descriptor back."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _map(self) -> None:
        self._memory = mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size)


class _Description:
    """What a value is made of, its tensors, and how many bytes they need."""

    def __init__(self) -> None:
        self.arrays: list[tuple[StackedRows, list[int], int]] = []  # with the shape of each, and where it begins
        self.size = 0

    def of(self, value: Any) -> Any:
        """Returns what a value is made of."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, np.ndarray):
            return self._array(StackedRows([value]), _NAMES.get(value.dtype), list(value.shape))
        if isinstance(value, dict):
            return ["dict", [[self.of(key), self.of(entry)] for key, entry in value.items()]]
        if (kind := _LISTS.get(type(value))) is not None:
            return [kind, [self.of(entry) for entry in value]]
        if isinstance(value, StackedRows):
            return self._array(value, _NAMES.get(value.parts[0].dtype), value.shape)
        if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
            seen, dtype = _as_numpy(value)
            return self._array(StackedRows([seen]), dtype, list(value.shape))
        if isinstance(value, tuple) and hasattr(value, "_asdict"):
            return self.of(value._asdict())
        if isinstance(value, list | tuple):  # of a class of one's own
            return ["list" if isinstance(value, list) else "tuple", [self.of(entry) for entry in value]]
        raise NotSharable(f"a {type(value).__name__}")

    def _array(self, rows: StackedRows, dtype: str | None, shape: list[int]) -> list[Any]:
        if dtype is None:
            raise NotSharable(f"an array of {rows.parts[0].dtype}")
        offset, itemsize = self.size, rows.parts[0].itemsize
        self.arrays.append((rows, shape, offset))
        self.size = _aligned(offset + math.prod(shape) * itemsize)
        return ["tensor", dtype, shape, offset]


def _as_numpy(tensor: Any) -> tuple[np.ndarray, str]:
    """Returns a torch tensor's elements as NumPy sees them, and its type's name. bfloat16 is seen as int16."""
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise NotSharable("a sparse or quantized tensor")
    plain = tensor.detach()
    if tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        plain = plain.cpu().resolve_conj().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        return (plain.view(torch.int16) if name == "bfloat16" else plain).numpy(), name
    except TypeError:
        raise NotSharable(f"a tensor of {name}") from None


def _restored(entry: Any, tensor: Callable[[str, list[int], int], Any]) -> Any:
    if not isinstance(entry, list):
        return entry
    kind = entry[0]
    if kind == "tensor":
        return tensor(entry[1], entry[2], entry[3])
    if kind == "dict":
        return {_restored(key, tensor): _restored(one, tensor) for key, one in entry[1]}
    values = [_restored(one, tensor) for one in entry[1]]
    return values if kind == "list" else tuple(values)


def _numpy_array(memory: mmap.mmap, start: int, dtype: str, shape: list[int], offset: int) -> np.ndarray:
    count, at = math.prod(shape), start + offset
    if dtype == "bfloat16":  # the upper half of a float32, which NumPy has
        halves = np.frombuffer(memory, np.uint16, count, at) if count else np.empty(0, np.uint16)
        return (halves.astype(np.uint32) << 16).view(np.float32).reshape(shape)
    if not count:
        return np.empty(shape, dtype)
    return np.frombuffer(memory, dtype, count, at).reshape(shape).copy()


def _torch_tensor(memory: mmap.mmap, start: int, dtype: str, shape: list[int], offset: int) -> Any:
    import torch

    kind = getattr(torch, dtype)
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(memory, dtype=kind, count=count, offset=start + offset).view(shape).clone()


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
