"""An arena: one shared segment of memory (`segment.py`), seen as tensors by every process of a host.

A replica that shares memory with nobody, above all one on a GPU, has a private arena on its own device.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence

import torch

from paceline.errors import ArenaError
from paceline.machine import free_memory
from paceline.memory import segment

NO_DESCRIPTOR = -1
PAGE_BYTES = 4096


class Arena:
    """A mapped shared segment, and typed views of it."""

    def __init__(self, memory: torch.Tensor, descriptor: int = NO_DESCRIPTOR) -> None:
        self._bytes = memory
        self.descriptor = descriptor
        if descriptor != NO_DESCRIPTOR:
            self._give_back = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, size: int, what: str, *, sparse: bool = False) -> Arena:
        """A new segment of zeros. Its pages are reserved now: full memory is an error here, not a crash later. But not
        if it is `sparse`: then memory is taken as it is used."""
        free = free_memory()
        if size > free and not sparse:
            raise ArenaError(_too_large(size, free, what))
        try:
            return cls.of(segment.make("arena", size, reserve=not sparse))
        except OSError as error:
            raise ArenaError(_too_large(size, free, what)) from error

    @classmethod
    def private(cls, size: int, device: torch.device) -> Arena:
        """Memory of this process alone."""
        return cls(torch.zeros(size, dtype=torch.uint8, device=device))

    @classmethod
    def attach(cls, process: int, descriptor: int) -> Arena:
        """The segment that process number `process` holds open as `descriptor`."""
        return cls.of(segment.open_held(process, descriptor))

    @classmethod
    def of(cls, descriptor: int) -> Arena:
        """The segment behind a descriptor, which this takes over."""
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        return cls(torch.frombuffer(memory, dtype=torch.uint8), descriptor)

    @property
    def size(self) -> int:
        return self._bytes.numel()

    def view(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A tensor that is these bytes of the segment."""
        size = math.prod(shape) * dtype.itemsize
        return self._bytes[offset : offset + size].view(dtype).view(tuple(shape))

    def close(self) -> None:
        """Give the descriptor back. The memory itself goes with the last view of it."""
        if self.descriptor != NO_DESCRIPTOR:
            self._give_back()
            self.descriptor = NO_DESCRIPTOR


def in_pages(size: int) -> int:
    """The bytes of the pages that so many bytes are in.

    >>> in_pages(0), in_pages(1), in_pages(4096)
    (0, 4096, 4096)
    """
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def place(lengths: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where regions of these lengths lie, one after another, and what they need in all. No two share a page: neighbours
    do not slow each other down.

    >>> place({"words": 8, "parameters": 5000})
    ({'words': 0, 'parameters': 4096}, 12288)
    """
    offsets, end = {}, 0
    for name, length in lengths.items():
        offsets[name] = end
        end = in_pages(end + length)
    return offsets, end


def _too_large(size: int, free: int, what: str) -> str:
    return (
        f"shared memory for {what} needs {_mib(size)} and {_mib(free)} is free: "
        "use fewer replicas, a smaller model, or a machine with more memory"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
