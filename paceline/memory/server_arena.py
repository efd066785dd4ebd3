"""The memory of one server: its parameters, and room for every replica's gradient of them.

    words        version · for each chunk how often it has been written, odd while it is
    parameters   one copy
    gradients    one flat buffer a replica: where it leaves its gradient
    pulled       one flat buffer a replica: the parameters as it last pulled them (async rules)
    touched      (replica, slot) 1 if the replica's gradient for it is there

Replicas of the same host map it and work in place. What others send over TCP is received into other memory, which takes
the place of the row when it is there as a whole (`replace_gradient`). It is not reserved in advance: `pulled` takes no
memory unless it is used.
"""

from __future__ import annotations

import os
import time

import torch

from paceline.errors import ArenaError
from paceline.machine import free_memory
from paceline.memory import segment
from paceline.memory.arena import Arena, in_pages, place
from paceline.memory.layout import Chunk, FlatLayout


class ServerArena:
    """Typed views of one server's memory."""

    def __init__(self, arena: Arena, layout: FlatLayout, replicas: int) -> None:
        self.arena = arena
        self.layout = layout
        self.replicas = replicas
        offsets, total = _regions(layout, replicas)
        if arena.size != total:
            raise ArenaError(f"the server's memory has {arena.size} bytes and this replica expects {total}")
        size, byte = layout.bytes, torch.uint8
        # Looked at one by one: as a memoryview, which takes a tenth of the time of a tensor's index.
        self.words = arena.view(0, torch.int64, [1 + len(layout.chunks)]).numpy().data
        self.parameters = arena.view(offsets["parameters"], byte, [size])
        self._own_gradients, self.pulled = (
            [arena.view(offsets[name] + row * in_pages(size), byte, [size]) for row in range(replicas)]
            for name in ("gradients", "pulled")
        )
        self.gradients = list(self._own_gradients)
        self.touched = arena.view(offsets["touched"], byte, [replicas, len(layout.slots)])

    @classmethod
    def create(cls, layout: FlatLayout, replicas: int) -> ServerArena:
        _, total = _regions(layout, replicas)
        need, free = (1 + replicas) * layout.bytes, free_memory()
        if need > free:
            mib = [f"{size / 2**20:,.0f} MiB" for size in (layout.bytes, need, free)]
            raise ArenaError(f"{mib[0]} of parameters with {replicas} replicas need {mib[1]} and {mib[2]} is free")
        return cls(Arena.of(segment.make("server", total)), layout, replicas)

    @property
    def version(self) -> int:
        return self.words[0]

    @version.setter
    def version(self, value: int) -> None:
        self.words[0] = value

    def chunk_of(self, flat: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """The chunk's range of a flat buffer, in the chunk's type."""
        return flat[chunk.start : chunk.stop].view(chunk.dtype)

    def replace_gradient(self, replica: int, received: torch.Tensor) -> torch.Tensor | None:
        """Have `received` be what the replica has left; return the memory of the one before, if it was received too."""
        before, self.gradients[replica] = self.gradients[replica], received
        return before if before is not self._own_gradients[replica] else None

    def share_gradient(self, replica: int) -> None:
        """A process of this host is in that place: it leaves its gradients in the row itself."""
        own, before = self._own_gradients[replica], self.gradients[replica]
        if before is not own:
            own.copy_(before)  # it may still be used
            self.gradients[replica] = own

    # ── reading while the server writes ──────────────────────────────────────────────────────────────────

    def copy_parameters(self, into: torch.Tensor, patience_s: float = 1.0) -> int | None:
        """Copy what the server has, every chunk as it was at one moment; the version it had at the beginning.

        None, if a chunk is not finished for so long: its server may have died in the middle of it.
        """
        version, give_up = self.version, time.monotonic() + patience_s
        for number, chunk in enumerate(self.layout.chunks, 1):
            while True:
                before = self.words[number]
                if before % 2 == 0:
                    into[chunk.start : chunk.stop] = self.parameters[chunk.start : chunk.stop]
                    if self.words[number] == before:
                        break
                if time.monotonic() > give_up:
                    return None
                os.sched_yield()
        return version


def _regions(layout: FlatLayout, replicas: int) -> tuple[dict[str, int], int]:
    pages = in_pages(layout.bytes)
    lengths = {
        "words": 8 * (1 + len(layout.chunks)),
        "parameters": pages,
        "gradients": replicas * pages,
        "pulled": replicas * pages,
        "touched": replicas * len(layout.slots),
    }
    return place(lengths)
