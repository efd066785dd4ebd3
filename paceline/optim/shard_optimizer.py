"""The user's own optimizer, applied in place to chunks of an arena.

Any process of the host can update any chunk: parameters and state lie in the arena, and the options come from the
user's optimizer, which every replica has. So an owner's work can be taken over at any moment.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from paceline.errors import ModelError
from paceline.memory.layout import Chunk, FlatLayout, Piece
from paceline.optim.models import group_sizes, refuse_added_parameters
from paceline.optim.state import Entry, StateLayout
from paceline.optim.trial import KNOWN, Sees, bare_copy, options_of

# These have a kernel that reads and writes every element once; the results agree to rounding.
FUSED: frozenset[type[Optimizer]] = frozenset(
    {torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad}
)


class ChunkMemory(Protocol):
    """Where the chunks lie: their parameters and their state blocks."""

    layout: FlatLayout
    parameters: torch.Tensor

    def chunk_of(self, flat: torch.Tensor, chunk: Chunk) -> torch.Tensor: ...

    def state_block(self, number: int) -> torch.Tensor: ...


@dataclass
class _PieceState:
    """One piece as the optimizer sees it: a parameter, and its state as views of the arena."""

    index: int  # in its chunk
    piece: Piece
    group: int
    parameter: torch.Tensor
    state: list[tuple[Entry, torch.Tensor]]
    born: bool


class ShardOptimizer:
    """Updates chunks of an arena as the user's optimizer would."""

    def __init__(self, optimizer: Optimizer, arena: ChunkMemory, states: StateLayout) -> None:
        self._users = optimizer
        self._arena = arena
        self._layout = arena.layout
        self._states = states
        self._entries = states.entries
        self._own = bare_copy(optimizer)
        self._whole = states.traits.sees is not Sees.ELEMENTS
        self._known = type(optimizer) in KNOWN
        self._held: dict[int, list[_PieceState]] = {}
        self._group_sizes = group_sizes(optimizer)
        with_complex = {slot.group for slot in self._layout.slots if slot.dtype.is_complex}
        self._fusable = set(range(len(self._group_sizes))) - with_complex if type(optimizer) in FUSED else set()
        self._groups: list[dict[str, Any]] = []
        self.refresh_options()

    def beside(self) -> ShardOptimizer:
        """Return one for another thread, which may update other chunks at the same time. What either holds of a chunk,
        both hold: it does not matter who updated it last."""
        other = ShardOptimizer(self._users, self._arena, self._states)
        other._held, other._own.state = self._held, self._own.state
        return other

    def refresh_options(self) -> None:
        """Take over learning rates and other options, which the user or a scheduler may have changed."""
        refuse_added_parameters(self._users, self._group_sizes)
        self._groups = [_as_now(options_of(group)) for group in self._users.param_groups]
        for number in self._fusable:
            group = self._groups[number]
            if not group.get("foreach") and group.get("fused") is None and not group.get("differentiable"):
                group["fused"] = True

    def options_fingerprint(self) -> int:
        """Equal on all replicas, or they no longer train the same model. What updates count is in the arena."""
        counted = self._states.traits.in_groups
        options = [
            [
                (k, v.tolist() if isinstance(v, torch.Tensor) else v)
                for k, v in sorted(group.items())
                if k not in counted
            ]
            for group in self._groups
        ]
        return zlib.crc32(repr(options).encode())

    def update(self, number: int, gradient: torch.Tensor, touched: Sequence[int]) -> None:
        """Update chunk `number`. `gradient` is the summed gradient over the chunk's range; `touched` tells by slot
        whether there is one at all (a parameter nobody used is left alone, as in one process)."""
        chunk, all_held = self._layout.chunks[number], self._hold(number)
        used = [held for held in all_held if touched[held.piece.slot]]
        for held in used:
            held.parameter.grad = self._range(gradient, chunk, held.piece)
        if self._known:
            # Those with state and those without are updated apart: fused kernels do not take a mixture.
            alike: dict[tuple[int, bool], list[torch.Tensor]] = {}
            for held in used:
                alike.setdefault((held.group, held.born), []).append(held.parameter)
            self._own.param_groups = [{**self._groups[group], "params": part} for (group, _), part in alike.items()]
            self._own.step()
        else:
            self._update_as_one(number, all_held)
            used = [held for held in all_held if touched[held.piece.slot] or held.parameter in self._own.state]
        for held in used:
            held.parameter.grad = None
            self._keep(number, held)

    def _update_as_one(self, number: int, all_held: Sequence[_PieceState]) -> None:
        """For a class that we do not know: each group once and with all its tensors, in the user's order, so that what
        it counts in its groups is right too."""
        block = self._arena.state_block(number)
        by_group: dict[int, list[torch.Tensor]] = {}
        for held in reversed(all_held):
            by_group.setdefault(held.group, []).append(held.parameter)
        entries = self._states.group_entries[number]
        self._own.param_groups = [
            {**self._groups[group], **_counted(of_group, block), "params": by_group[group]}
            for group, of_group in entries.items()
        ]
        self._own.step()
        for after, (group, of_group) in zip(self._own.param_groups, entries.items(), strict=True):
            for entry in of_group:
                if entry.key in after:
                    entry.write(block, after[entry.key])
            before = self._groups[group]
            for key in after.keys() - {entry.key for entry in of_group} - {"params"}:
                if key not in before or after[key] is not before[key]:
                    raise self._refusal(f"it changes {key!r} in its groups, which it did not do in its first updates")

    def _show_what_groups_keep(self) -> None:
        """Have in the user's groups what updates have counted there, for a save. Not while others update: they may be a
        step ahead."""
        for number, of_chunk in enumerate(self._states.group_entries if self._states.traits.in_groups else ()):
            block = self._arena.state_block(number)
            for group, entries in of_chunk.items():
                self._users.param_groups[group].update(_counted(entries, block))

    def forget(self) -> None:
        """Read everything from the arena again before the next update: somebody else has changed it."""
        self._held.clear()
        self._own.state.clear()

    def _hold(self, number: int) -> list[_PieceState]:
        if number in self._held:
            return self._held[number]
        chunk = self._layout.chunks[number]
        flat = self._arena.chunk_of(self._arena.parameters, chunk)
        block = self._arena.state_block(number)
        born = block[: len(chunk.pieces)].tolist()
        self._held[number] = []
        for index, piece in enumerate(chunk.pieces):
            group = self._layout.slots[piece.slot].group
            assert group is not None
            state = [(entry, entry.view(block)) for entry in self._entries[number][index]]
            held = _PieceState(index, piece, group, self._range(flat, chunk, piece), state, bool(born[index]))
            if held.born:
                self._own.state[held.parameter] = {
                    entry.key: value if entry.python is None else entry.read(block)
                    for entry, value in state
                    if block[entry.mark]
                }
            self._held[number].append(held)
        return self._held[number]

    def _keep(self, number: int, held: _PieceState) -> None:
        """Make sure the piece's state lies in the arena: what the optimizer has made anew is copied there."""
        state = self._own.state[held.parameter]
        for entry, value in held.state:
            kept = state.get(entry.key)
            if kept is value or kept is None:
                continue
            entry.write(self._arena.state_block(number), kept)
            if isinstance(kept, torch.Tensor):
                state[entry.key] = value
        if not held.born or not self._known:
            self._refuse_unknown(state, held)
        if not held.born:
            self._arena.state_block(number)[held.index] = 1
            held.born = True

    def _refuse_unknown(self, state: Mapping[str, Any], held: _PieceState) -> None:
        known = {entry.key for entry, _ in held.state}
        for key, value in state.items():
            if value is not None and key not in known:
                raise self._refusal(
                    f"it keeps {key!r} for some tensors only, or not from its first updates on; give all tensors of a "
                    "group the same options"
                )

    def _refusal(self, why: str) -> ModelError:
        return ModelError("optimizer", type(self._users).__name__, why)

    def _range(self, flat: torch.Tensor, chunk: Chunk, piece: Piece) -> torch.Tensor:
        """The piece's elements of a flat buffer that covers the chunk."""
        slot = self._layout.slots[piece.slot]
        begin = (slot.offset - chunk.start) // slot.dtype.itemsize + piece.start
        part = flat[begin : begin + piece.elements]
        return part.view(slot.shape) if self._whole else part

    # ── whole tensors in and out ─────────────────────────────────────────────────────────────────────────

    def take_state(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Fill the arena with whole-tensor states, by slot. A slot that is not named has no state yet."""
        self.forget()
        for number, chunk in enumerate(self._layout.chunks):
            block = self._arena.state_block(number)
            for entries in self._states.group_entries[number].values():
                for entry in entries:
                    block[entry.mark] = 0  # what the user's groups say is right
            for index, piece in enumerate(chunk.pieces):
                given = states.get(piece.slot, {})
                block[index] = int(bool(given))
                for entry in self._entries[number][index]:
                    value = given.get(entry.key)
                    block[entry.mark] = 0
                    if isinstance(value, torch.Tensor) and entry.elementwise:
                        value = value.detach().reshape(-1)[piece.start : piece.stop]
                    if value is not None:
                        entry.write(block, value)

    def give_state(self) -> dict[int, dict[str, Any]]:
        """The state of every parameter that has been updated, as whole tensors, by slot."""
        self._show_what_groups_keep()
        states: dict[int, dict[str, Any]] = {}
        for number, chunk in enumerate(self._layout.chunks):
            block = self._arena.state_block(number)
            for index, piece in enumerate(chunk.pieces):
                if not int(block[index]):
                    continue
                slot = self._layout.slots[piece.slot]
                state = states.setdefault(piece.slot, {})
                for entry in self._entries[number][index]:
                    if not block[entry.mark]:
                        continue
                    value = entry.read(block)
                    if entry.elementwise:
                        whole = state.setdefault(entry.key, torch.empty(slot.shape, dtype=entry.dtype))
                        whole.view(-1)[piece.start : piece.stop] = value
                    else:
                        state[entry.key] = value.clone() if isinstance(value, torch.Tensor) else value
        return states


def _as_now(options: dict[str, Any]) -> dict[str, Any]:
    """Options that a scheduler does not change any more, which writes into those that are tensors."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}


def _counted(entries: Sequence[Entry], block: torch.Tensor) -> dict[str, Any]:
    """What a group has counted by now, in copies."""
    found = {entry.key: entry.read(block) for entry in entries if block[entry.mark]}
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in found.items()}
