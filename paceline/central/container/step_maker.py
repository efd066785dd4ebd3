"""Making a step on one server's share: the accepted gradients are added up, and the optimizer updates the parameters.

It goes chunk by chunk, two megabytes that stay in the cache: gradients are added up in the order of the close,
corrected for staleness if the rule says so, and the optimizer updates the chunk in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from paceline.central.chief.tickets import Accepted, Close
from paceline.central.jobs import together
from paceline.central.shards import Option, Spec, make_optimizer, restored_options
from paceline.errors import PacelineError
from paceline.memory.layout import Chunk, FlatLayout
from paceline.memory.server_arena import ServerArena
from paceline.optim.shard_optimizer import ShardOptimizer
from paceline.optim.state import StateLayout

THREADS = 2  # that make a sync step; one core alone does not use all of the memory's bandwidth

States = dict[int, dict[str, Any]]


class _Memory:
    """What a `ShardOptimizer` works on: parameters in the arena, state in the server's own memory."""

    def __init__(self, arena: ServerArena, block_bytes: Sequence[int]) -> None:
        self.layout: FlatLayout = arena.layout
        self.parameters = arena.parameters
        self._blocks = [torch.zeros(size, dtype=torch.uint8) for size in block_bytes]

    def chunk_of(self, flat: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        return flat[chunk.start : chunk.stop].view(chunk.dtype)

    def state_block(self, number: int) -> torch.Tensor:
        return self._blocks[number]


class _Updater:
    """What one thread needs to update chunks: an optimizer, and room for what it works out."""

    def __init__(self, optimizer: ShardOptimizer, room: int) -> None:
        self.optimizer = optimizer
        self.scratch = torch.empty(room, dtype=torch.uint8)
        self.correction = torch.empty(room, dtype=torch.uint8)


class StepMaker:
    """Updates the parameters that lie in one arena."""

    def __init__(self, spec: Spec, arena: ServerArena, not_pulled: set[int], *, recording: bool) -> None:
        """`not_pulled`: replicas of which it is not known what they computed on; others change it.

        `recording`: the summed gradients of the last step are kept.
        """
        self._arena, self._layout = arena, arena.layout
        self._not_pulled = not_pulled
        self._users = make_optimizer(spec.optimizer)
        states = StateLayout(self._users, self._layout, {})
        self._entries = {
            piece.slot: entries
            for chunk, of_chunk in zip(self._layout.chunks, states.entries, strict=True)
            for piece, entries in zip(chunk.pieces, of_chunk, strict=True)
        }
        memory = _Memory(arena, states.block_bytes)
        largest = max((chunk.bytes for chunk in self._layout.chunks), default=0)
        first = ShardOptimizer(self._users, memory, states)
        self._updaters = [_Updater(first, largest)] + [_Updater(first.beside(), largest) for _ in range(1, THREADS)]
        self._sums = torch.zeros(self._layout.bytes if recording else 0, dtype=torch.uint8)
        self._last_touched: list[int] = []

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's, with the options of the last step."""
        return self._users.param_groups

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────

    def update(self, close: Close, options: Sequence[Mapping[str, Option]], scale: float) -> None:
        """Make the step."""
        self._take_options(options, close.lr)
        touched = self._last_touched = self._touched(close)

        left = iter(range(len(self._layout.chunks)))  # each thread takes the next one: cores are not equally fast

        def update(updater: _Updater) -> None:
            for number in left:
                self._update_chunk(number, updater, close, touched, scale)

        # After the gradient of one alone, the others are computing and need the cores; if there are any.
        if len(close.accepted) == 1 < len(self._arena.gradients) or len(self._layout.chunks) < THREADS:
            update(self._updaters[0])
        else:
            together([partial(update, updater) for updater in self._updaters])

    def _update_chunk(self, number: int, updater: _Updater, close: Close, touched: Sequence[int], scale: float) -> None:
        chunk, words = self._layout.chunks[number], self._arena.words
        gradient = self._gradient(close, chunk, updater)
        if self._sums.numel():
            self._arena.chunk_of(self._sums, chunk).copy_(gradient)
        if scale != 1.0:
            gradient = torch.mul(gradient, scale, out=_typed(updater.scratch, chunk))
        words[number + 1] += 1
        try:
            updater.optimizer.update(number, gradient, touched)
        finally:
            words[number + 1] += 1  # nobody must wait for a chunk that is never finished

    def squared_norm(self, close: Close) -> float:
        """Return the squared length of the step's gradient, as far as it lies here."""
        touched = self._touched(close)
        total = 0.0
        for chunk in self._layout.chunks:
            gradient = self._gradient(close, chunk, self._updaters[0])
            for piece in chunk.pieces:
                if touched[piece.slot]:
                    slot = self._layout.slots[piece.slot]
                    begin = (slot.offset - chunk.start) // slot.dtype.itemsize
                    part = gradient[begin : begin + piece.elements]
                    total += float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2
        return total

    def sums(self) -> tuple[torch.Tensor, list[int]]:
        """Return the gradient of the last step (while recording), and the slots that have one."""
        return self._sums.clone(), [slot for slot, touched in enumerate(self._last_touched) if touched]

    def _take_options(self, options: Sequence[Mapping[str, Option]], factor: float) -> None:
        for group, given in zip(self._users.param_groups, options, strict=True):
            group.update(restored_options(given))
            group["lr"] = group["lr"] * factor
        for updater in self._updaters:
            updater.optimizer.refresh_options()

    def _touched(self, close: Close) -> list[int]:
        rows = [self._arena.touched[accepted.replica] for accepted in close.accepted]
        touched: list[int] = torch.stack(rows).amax(0).tolist()
        return touched

    # ── gradients ────────────────────────────────────────────────────────────────────────────────────────

    def _gradient(self, close: Close, chunk: Chunk, updater: _Updater) -> torch.Tensor:
        """Return the weighted sum of the accepted gradients over a chunk."""
        first, *others = close.accepted
        total = self._one_gradient(first, chunk, close.compensation, updater)
        if others or first.weight != 1.0:
            total = torch.mul(total, first.weight, out=_typed(updater.scratch, chunk))
        for accepted in others:
            total.add_(self._one_gradient(accepted, chunk, close.compensation, updater), alpha=accepted.weight)
        return total

    def _one_gradient(self, accepted: Accepted, chunk: Chunk, compensation: float, updater: _Updater) -> torch.Tensor:
        arena = self._arena
        gradient = arena.chunk_of(arena.gradients[accepted.replica], chunk)
        if not self.corrects(accepted, compensation):
            return gradient
        # What the gradient would be on the parameters as they are now, to first order: g + H (now - pulled). The
        # Hessian's diagonal is about the mean square of the samples' gradients (Fisher), which is as many times the
        # square of their mean as there are samples (and not what a loss counts: that has any unit). A correction larger
        # than the gradient is beyond what the first order tells: with large steps it would swing by itself.
        pulled = arena.chunk_of(arena.pulled[accepted.replica], chunk)
        now = arena.chunk_of(arena.parameters, chunk)
        correction = torch.sub(now, pulled, out=_typed(updater.correction, chunk))
        relative = correction.mul_(gradient).mul_(compensation * accepted.samples * accepted.unit).clamp_(-1.0, 1.0)
        return relative.add_(1.0).mul_(gradient)

    def corrects(self, accepted: Accepted, compensation: float) -> bool:
        """Return whether that gradient is corrected for staleness."""
        return bool(compensation and accepted.staleness and accepted.replica not in self._not_pulled)

    # ── the optimizer's state ────────────────────────────────────────────────────────────────────────────

    def state(self) -> States:
        """Return a copy of the optimizer's state, by slot."""
        return {
            slot: {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
            for slot, state in self._updaters[0].optimizer.give_state().items()
        }

    def take_state(self, states: States) -> None:
        self._updaters[0].optimizer.take_state(states)

    def check_states(self, states: States) -> None:
        """Refuse state that does not fit the slots here; before anything is changed."""
        self.check_slots(states)
        for slot, state in states.items():
            for entry in self._entries.get(slot, ()):
                value = state.get(entry.key)
                if isinstance(value, torch.Tensor) and value.numel() != math.prod(entry.shape):
                    raise PacelineError(f"{entry.key} of slot {slot} has {value.numel()} values: {entry.shape} fit")

    def check_slots(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if not 0 <= slot < len(self._layout.slots):
                raise PacelineError(f"slot {slot} does not exist: this server has {len(self._layout.slots)}")


def _typed(flat: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    return flat[: chunk.bytes].view(chunk.dtype)
