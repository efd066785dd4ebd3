"""Samples on their way from a worker process to the one that forked it: any value, its tensors beside it.

    8 bytes each: number of parts, their sizes │ pickle │ array │ array …

Samples are of the user's own classes, so this is pickle: on a socket that has no name, between a process and its own
children, which have all of each other's memory anyway. Tensors and arrays go past it, from where they lie into one
block of the receiver's memory, of which the received ones are views.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

import torch

Message = list[memoryview]  # a pickle, and the arrays in it
_SIZE = struct.Struct("=Q")
_MOST_AT_ONCE = 512  # parts that one call of the kernel takes
_ALIGNED = 64  # bytes


class _Pickler(pickle.Pickler):
    """Pickles tensors of a CPU as their bytes."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
            return NotImplemented
        if not value.numel() or value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg():
            return NotImplemented
        flat = value.detach().contiguous().view(-1).view(torch.uint8)
        return _tensor, (pickle.PickleBuffer(flat.numpy().data), value.dtype, tuple(value.shape))


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape)


def pack(value: Any) -> Message:
    """Returns the parts of a value."""
    arrays: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=arrays.append).dump(value)
    return [file.getbuffer(), *(array.raw() for array in arrays)]


def unpack(message: Message) -> Any:
    """Returns the value; its tensors are views of the message, and nobody else's."""
    return pickle.loads(message[0], buffers=message[1:])


def send(connection: socket.socket, message: Sequence[memoryview | bytes]) -> None:
    """Sends all parts, from where they lie."""
    sizes = b"".join(map(_SIZE.pack, [len(message), *map(len, message)]))
    rest = [memoryview(part) for part in (sizes, *message) if len(part)]
    while rest:
        sent = connection.sendmsg(rest[:_MOST_AT_ONCE])
        while rest and sent >= len(rest[0]):
            sent -= len(rest.pop(0))
        if sent:
            rest[0] = rest[0][sent:]


def receive(connection: socket.socket) -> Message:
    """Returns the next message; raises EOFError if the other end is gone."""
    (count,) = _SIZE.unpack(_exactly(connection, _SIZE.size))
    sizes = [size for (size,) in _SIZE.iter_unpack(_exactly(connection, _SIZE.size * count))]
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    block = memoryview(bytearray(end))
    parts = [block[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    for part in parts:
        _fill(connection, part)
    return parts


def _exactly(connection: socket.socket, size: int) -> memoryview:
    found = memoryview(bytearray(size))
    _fill(connection, found)
    return found


def _fill(connection: socket.socket, part: memoryview) -> None:
    while part:
        got = connection.recv_into(part)
        if not got:
            raise EOFError
        part = part[got:]
