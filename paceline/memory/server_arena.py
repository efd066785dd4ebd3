"""The memory of one server: its parameters, and a place for every replica's gradient of them.

    the server      words        version · for each chunk how often it has been written, odd while it is
                    parameters   one copy
    each place      gradient     a flat buffer: where a replica leaves its gradient
                    pulled       a flat buffer: the parameters as it last pulled them (async rules)
                    touched      by slot: 1 if its gradient is there

Places come and go with replicas, and each is a segment of its own: whoever is in one notices nothing of the others.
Replicas of the same host map the parameters and their place, and work in them. What others send over TCP is received
into other memory, which takes the gradient's place when it is there as a whole (`replace_gradient`). Nothing is
reserved in advance: `pulled` takes no memory unless it is used.
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
    """Typed views of one server's memory, and of the places in it that are known here."""

    def __init__(self, arena: Arena, layout: FlatLayout) -> None:
        self.arena = arena
        self.layout = layout
        offsets, _ = _check(arena, _regions(layout))
        # Looked at one by one: as a memoryview, which takes a tenth of the time of a tensor's index.
        self.words = arena.view(0, torch.int64, [1 + len(layout.chunks)]).numpy().data
        self.parameters = arena.view(offsets["parameters"], torch.uint8, [layout.bytes])
        self.places: dict[int, Arena] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        self._own_gradients: dict[int, torch.Tensor] = {}
        self.pulled: dict[int, torch.Tensor] = {}
        self.touched: dict[int, torch.Tensor] = {}

    @classmethod
    def create(cls, layout: FlatLayout, replicas: int) -> ServerArena:
        """Return new memory without any place, if there is enough for so many."""
        need, free = (1 + replicas) * layout.bytes, free_memory()
        if need > free:
            mib = [f"{size / 2**20:,.0f} MiB" for size in (layout.bytes, need, free)]
            raise ArenaError(f"{mib[0]} of parameters with {replicas} replicas need {mib[1]} and {mib[2]} is free")
        return cls(Arena.of(segment.make("server", _regions(layout)[1])), layout)

    # ── places ───────────────────────────────────────────────────────────────────────────────────────────

    def make_place(self, number: int) -> None:
        """Have a place of that number, if there is none."""
        if number not in self.places:
            self.take_place(number, Arena.of(segment.make("place", _place_regions(self.layout)[1])))

    def take_place(self, number: int, arena: Arena) -> None:
        """Work in that place, whose memory is there."""
        offsets, _ = _check(arena, _place_regions(self.layout))
        size, byte = self.layout.bytes, torch.uint8
        self.places[number] = arena
        self._own_gradients[number] = self.gradients[number] = arena.view(offsets["gradient"], byte, [size])
        self.pulled[number] = arena.view(offsets["pulled"], byte, [size])
        self.touched[number] = arena.view(offsets["touched"], byte, [len(self.layout.slots)])

    def remove_place(self, number: int) -> None:
        """Give the memory of that place back."""
        if number in self.places:
            self.places.pop(number).close()
            for held in (self.gradients, self._own_gradients, self.pulled, self.touched):
                del held[number]

    def close(self) -> None:
        """Give all descriptors back. The memory itself goes with the last view of it."""
        for arena in (self.arena, *self.places.values()):
            arena.close()

    def replace_gradient(self, number: int, received: torch.Tensor) -> torch.Tensor | None:
        """Have `received` be what was left in a place; return the memory of the one before, if it was received too."""
        before, self.gradients[number] = self.gradients[number], received
        return before if before is not self._own_gradients[number] else None

    def share_gradient(self, number: int) -> None:
        """A process of this host is in that place: it leaves its gradients in the place itself."""
        own, before = self._own_gradients[number], self.gradients[number]
        if before is not own:
            own.copy_(before)  # it may still be used
            self.gradients[number] = own

    # ── parameters ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def version(self) -> int:
        return self.words[0]

    @version.setter
    def version(self, value: int) -> None:
        self.words[0] = value

    def chunk_of(self, flat: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """The chunk's range of a flat buffer, in the chunk's type."""
        return flat[chunk.start : chunk.stop].view(chunk.dtype)

    def copy_parameters(self, into: torch.Tensor, patience_s: float = 1.0) -> int | None:
        """Copy what the server has while it writes, every chunk as it was at one moment; the version it had at the
        beginning.

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


Regions = tuple[dict[str, int], int]  # where each begins, and what all need


def _regions(layout: FlatLayout) -> Regions:
    return place({"words": 8 * (1 + len(layout.chunks)), "parameters": in_pages(layout.bytes)})


def _place_regions(layout: FlatLayout) -> Regions:
    pages = in_pages(layout.bytes)
    return place({"gradient": pages, "pulled": pages, "touched": max(1, len(layout.slots))})  # a segment is never empty


def _check(arena: Arena, regions: Regions) -> Regions:
    if arena.size != regions[1]:
        raise ArenaError(f"the server's memory has {arena.size} bytes and this replica expects {regions[1]}")
    return regions
