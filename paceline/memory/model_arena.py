"""The arena of one model on one host: one copy of the parameters, a gradient slot a replica, one optimizer state.

description   the model's slots as JSON, so that a replica with another model is told what differs
parameters    one copy; every replica's model points here
gradients     one flat buffer a replica
sums          (several hosts) the gradient summed over all hosts
owed          (several hosts, lossy wire) what is owed after the last step, and what will be after the next; in turns
bases         (several hosts, powersgd) the bases of its matrices, after the last step and after the next; in turns
common        (hosts that step by themselves) the parameters that all hosts had when they last exchanged
outer         (the same, with momentum) that of the steps they make together
states        optimizer state, a block a chunk
undo          a replica's copy of the one chunk (parameters, then state block) it is updating
norms         (chunk) squared gradient norm
touched       (replica, parameter) 1 if this replica's step produced a gradient for it
logged        (replica) what its loss logs in a step, beside the loss
scratch       (parity, replica) contributions to small sums: batch statistics, evaluation
notes         what a replica that joins needs to know
buffers       the model's buffers, for a replica that joins
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from paceline.errors import ArenaError, LossError
from paceline.memory.arena import Arena, place
from paceline.memory.layout import Chunk, FlatLayout, Slot, aligned

NOTES_BYTES = 1 << 20
LOGGED_BYTES = 4096


@dataclass(frozen=True)
class ForHosts:
    """What the hosts of a run keep beside the model, in order to exchange."""

    sums: bool = False
    owed_floats: int = 0
    bases_floats: int = 0
    common: bool = False
    outer: bool = False


@dataclass(frozen=True)
class Sizes:
    """What an arena must hold, beside the layout. Every replica works it out for itself and gets the same."""

    replicas: int
    state_blocks: tuple[int, ...]  # bytes of optimizer state, by chunk
    scratch_bytes: int
    buffer_bytes: int
    for_hosts: ForHosts = ForHosts()


class ModelArena:
    """Typed views of one model's arena."""

    def __init__(self, arena: Arena, layout: FlatLayout, sizes: Sizes) -> None:
        self.arena = arena
        self.layout = layout
        regions, total = _regions(layout, sizes)
        if arena.size != total:
            raise ArenaError(
                f"the arena has {arena.size} bytes and this replica's model needs {total}: "
                "all replicas must build the same model and optimizer"
            )
        view, count, trained = arena.view, sizes.replicas, layout.trained_bytes
        byte = torch.uint8
        self._description = view(regions["description"], byte, [_description_bytes(layout)])
        self.parameters = view(regions["parameters"], byte, [layout.bytes])
        self.gradients = [view(regions["gradients"] + r * trained, byte, [trained]) for r in range(count)]
        hosts = sizes.for_hosts
        self.sums = view(regions["sums"], byte, [trained if hosts.sums else 0])
        self.owed = view(regions["owed"], torch.float32, [2, hosts.owed_floats])
        self.bases = view(regions["bases"], torch.float32, [2, hosts.bases_floats])
        self.common = view(regions["common"], byte, [trained if hosts.common else 0])
        self.outer = view(regions["outer"], byte, [trained if hosts.outer else 0])
        self._states = view(regions["states"], byte, [sum(sizes.state_blocks)])
        undo = _undo_bytes(layout, sizes)
        self._undo = [view(regions["undo"] + r * undo, byte, [undo]) for r in range(count)]
        self.norms = view(regions["norms"], torch.float64, [len(layout.chunks)])
        self.updated = _marks(view(regions["updated"], torch.int64, [len(layout.chunks)]))
        self.reduced = _marks(view(regions["reduced"], torch.int64, [len(layout.chunks)]))
        self.touched = view(regions["touched"], byte, [count, len(layout.slots)])
        self._logged = view(regions["logged"], byte, [count, LOGGED_BYTES])
        self.scratch_bytes = sizes.scratch_bytes
        scratch = view(regions["scratch"], byte, [2, count, sizes.scratch_bytes])
        self._scratch = [[scratch[parity, replica] for replica in range(count)] for parity in range(2)]
        self._notes = view(regions["notes"], byte, [NOTES_BYTES])
        self.buffers = view(regions["buffers"], byte, [sizes.buffer_bytes])
        self._block_starts = [0, *accumulate(sizes.state_blocks)]

    @classmethod
    def create(cls, layout: FlatLayout, sizes: Sizes, *, sparse: bool = False) -> ModelArena:
        """In shared memory; `sparse`: what is never used takes none."""
        _, total = _regions(layout, sizes)
        what = f"{sizes.replicas} replicas of a model of {layout.bytes / 2**20:,.1f} MiB"
        model_arena = cls(Arena.create(total, what, sparse=sparse), layout, sizes)
        model_arena._description.copy_(_as_bytes(_description(layout)))
        return model_arena

    @classmethod
    def private(cls, layout: FlatLayout, sizes: Sizes, device: torch.device) -> ModelArena:
        """For one replica alone."""
        return cls(Arena.private(_regions(layout, sizes)[1], device), layout, sizes)

    @staticmethod
    def described(arena: Arena) -> list[list[Any]]:
        """The slots of whoever made this arena: can be read before one's own sizes are known to fit."""
        length = int(arena.view(0, torch.int64, [1]).item())
        return json.loads(bytes(arena.view(8, torch.uint8, [length]).numpy()))  # type: ignore[no-any-return]

    # ── views ────────────────────────────────────────────────────────────────────────────────────────────

    def whole_state(self) -> list[torch.Tensor]:
        """Returns all that a host needs to go on where this one is: parameters, optimizer state, notes, buffers."""
        return [self.parameters, self._states, self._notes, self.buffers]

    def parameter(self, slot: Slot) -> torch.Tensor:
        return self._typed(self.parameters, slot)

    def gradient(self, replica: int, slot: Slot) -> torch.Tensor:
        return self._typed(self.gradients[replica], slot)

    def summed(self, slot: Slot) -> torch.Tensor:
        """The gradient summed over all hosts."""
        return self._typed(self.sums, slot)

    def outer_step(self, slot: Slot) -> torch.Tensor:
        """The momentum of the steps that hosts make together."""
        return self._typed(self.outer, slot)

    def chunk_of(self, flat: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """The chunk's range of a flat buffer, in the chunk's type."""
        return flat[chunk.start : chunk.stop].view(chunk.dtype)

    def state_block(self, number: int) -> torch.Tensor:
        """Optimizer state of chunk `number`, as bytes."""
        return self._states[self._block_starts[number] : self._block_starts[number + 1]]

    def undo(self, replica: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where `replica` keeps its copy of chunk `number`: of the parameters, of the state block."""
        chunk_bytes = self.layout.chunks[number].bytes
        space = self._undo[replica]
        start = aligned(chunk_bytes)
        return space[:chunk_bytes], space[start : start + self.state_block(number).numel()]

    def scratch(self, parity: int, replica: int, like: torch.Tensor) -> torch.Tensor:
        """Where `replica` leaves its contribution to a small sum."""
        size = like.numel() * like.dtype.itemsize
        return self._scratch[parity][replica][:size].view(like.dtype)

    @staticmethod
    def _typed(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
        return flat[slot.offset : slot.offset + slot.bytes].view(slot.dtype).view(slot.shape)

    # ── what losses log ──────────────────────────────────────────────────────────────────────────────────

    def write_logged(self, replica: int, text: bytes) -> None:
        """Leaves it for the others, who are told its length."""
        if len(text) > LOGGED_BYTES:
            raise LossError("loss", f"a dict of {len(text)} bytes", f"{LOGGED_BYTES} fit; log less in every step")
        self._logged[replica, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def read_logged(self, replica: int, length: int) -> bytes:
        return bytes(self._logged[replica, :length].cpu().numpy())

    # ── notes ────────────────────────────────────────────────────────────────────────────────────────────

    def write_notes(self, notes: bytes) -> None:
        text = _as_bytes(notes)
        if text.numel() > NOTES_BYTES:
            raise ArenaError(f"the notes for a joining replica take {text.numel()} bytes: {NOTES_BYTES} fit")
        self._notes[: text.numel()] = text

    def read_notes(self) -> bytes:
        length = int(self._notes[:8].view(torch.int64).item())
        return bytes(self._notes[8 : 8 + length].numpy())


def _marks(words: torch.Tensor) -> memoryview:
    """Words that are looked at one by one: as a memoryview, which takes a tenth of the time of a tensor's index."""
    return words.cpu().numpy().data  # of a GPU's arena this is a copy: with one replica nobody else looks


def _description(layout: FlatLayout) -> bytes:
    return json.dumps(layout.describe()).encode()


def _description_bytes(layout: FlatLayout) -> int:
    return 8 + len(_description(layout))


def _as_bytes(text: bytes) -> torch.Tensor:
    """Length, then the text."""
    return torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)


def _undo_bytes(layout: FlatLayout, sizes: Sizes) -> int:
    need = [aligned(chunk.bytes) + block for chunk, block in zip(layout.chunks, sizes.state_blocks, strict=True)]
    return aligned(max(need, default=0))


def _regions(layout: FlatLayout, sizes: Sizes) -> tuple[dict[str, int], int]:
    trained, count = layout.trained_bytes, sizes.replicas
    lengths = {
        "description": _description_bytes(layout),
        "parameters": layout.bytes,
        "gradients": count * trained,
        "sums": trained if sizes.for_hosts.sums else 0,
        "owed": 2 * 4 * sizes.for_hosts.owed_floats,
        "bases": 2 * 4 * sizes.for_hosts.bases_floats,
        "common": trained if sizes.for_hosts.common else 0,
        "outer": trained if sizes.for_hosts.outer else 0,
        "states": sum(sizes.state_blocks),
        "undo": count * _undo_bytes(layout, sizes),
        "norms": 8 * len(layout.chunks),
        "updated": 8 * len(layout.chunks),
        "reduced": 8 * len(layout.chunks),
        "touched": count * len(layout.slots),
        "logged": count * LOGGED_BYTES,
        "scratch": 2 * count * sizes.scratch_bytes,
        "notes": NOTES_BYTES,
        "buffers": sizes.buffer_bytes,
    }
    return place(lengths)
