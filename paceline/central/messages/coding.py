"""Chunks on a wire."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from paceline.central.messages.tensor_bytes import bytes_of
from paceline.exchange.wire import wire
from paceline.memory.layout import Chunk, FlatLayout
from paceline.net.frames import Channel, Header


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

    def room(self) -> torch.Tensor:
        """Return memory for any one coded chunk."""
        most = 0 if self.exact else max(map(self.bytes_of, self._layout.chunks), default=0)
        return torch.empty(most, dtype=torch.uint8)

    def encode(self, flat: torch.Tensor, chunk: Chunk, room: torch.Tensor) -> torch.Tensor:
        """Return the chunk's bytes: in place, or coded into `room`."""
        source = flat[chunk.start : chunk.stop]
        if self.exact or chunk.dtype != torch.float32:
            return source
        coded = room[: self.bytes_of(chunk)]
        self._wire.encode(source.view(torch.float32), coded)
        return coded

    def read(self, channel: Channel[Header], flat: torch.Tensor, chunks: Iterable[Chunk]) -> None:
        """Read a frame's body, which has these chunks one after another, into a flat buffer."""
        room = self.room()
        for chunk in chunks:
            target = flat[chunk.start : chunk.stop]
            if self.exact or chunk.dtype != torch.float32:
                channel.read_body(bytes_of(target))
            else:
                coded = room[: self.bytes_of(chunk)]
                channel.read_body(bytes_of(coded))
                self._wire.decode(coded, target.view(torch.float32))
