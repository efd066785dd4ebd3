"""Chunks on a wire."""

from __future__ import annotations

import torch

from paceline.exchange.wire import wire
from paceline.memory.layout import Chunk, FlatLayout


class Coding:
    """How a server's flat buffer looks on a wire: chunk after chunk, each coded by itself.

    Chunks of float32 are coded as the wire says, others travel as they are.
    """

    def __init__(self, layout: FlatLayout, name: str) -> None:
        self._layout = layout
        self._wire = wire(name)
        self.exact = name == "fp32"

    def bytes_of(self, chunk: Chunk) -> int:
        if self.exact or chunk.dtype != torch.float32:
            return chunk.bytes
        return self._wire.encoded_bytes(chunk.bytes // 4)

    @property
    def bytes(self) -> int:
        return sum(map(self.bytes_of, self._layout.chunks))

    @property
    def most(self) -> int:
        """The bytes of the largest chunk."""
        return max(map(self.bytes_of, self._layout.chunks), default=0)

    def encode(self, flat: torch.Tensor, chunk: Chunk, room: torch.Tensor) -> torch.Tensor:
        """The chunk's bytes: in place, or coded into `room`."""
        source = flat[chunk.start : chunk.stop]
        if self.exact or chunk.dtype != torch.float32:
            return source
        coded = room[: self.bytes_of(chunk)]
        self._wire.encode(source.view(torch.float32), coded)
        return coded

    def decode(self, coded: torch.Tensor, flat: torch.Tensor, chunk: Chunk) -> None:
        self._wire.decode(coded, flat[chunk.start : chunk.stop].view(torch.float32))
