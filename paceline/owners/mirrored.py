"""Mirrored replicas on one host: a step is proposed by all, and committed.

    replica    ── compute its part ──▶ arrive ─┐                ┌─ update own shard ─▶ done ─┐
    replica    ── compute its part ─────▶ arrive ┤ all arrived  ├─ update own shard ──▶ done ┤ all done
    replica    ── compute its part ──▶ arrive ─┘                └─ update own shard ─▶ done ─┘

Before all have arrived nothing has changed: a death there means that the others try the step again, with its
samples divided among them. After that every gradient is in the arena, and the step will be completed, by whoever
is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import ModelError
from paceline.exchange.board import Board, HostWord, Kind, Members, Phase, Word
from paceline.exchange.shared import SharedSums
from paceline.exchange.together import Together
from paceline.launch.place import Place
from paceline.owners.batchnorm import Statistics, make_exact
from paceline.owners.build import SharedModel, announce
from paceline.owners.engine import Closed, Computed, Share, StateByName
from paceline.owners.gradients import GradientCollector
from paceline.owners.models import own_state
from paceline.owners.optimizer import ShardOptimizer
from paceline.owners.owner import Owner


class MirroredEngine:
    """One replica among several that share a model."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, place: Place, board: Board) -> None:
        self._model = model
        self._board = board
        self._replica = place.replica
        self._together = Together(board, place.replica, place.strategy.timeout_s)
        self.joining = place.restarted
        self.gradients_ready: Callable[[], None] | None = None
        self.notes_for_joining: Callable[[], dict[str, Any]] = dict
        announce(board, self._replica)
        self._shared = SharedModel(model, optimizer, self._together, several_hosts=False)
        self._shared.join() if self.joining else self._shared.share()
        arena = self._arena = self._shared.arena
        self._optimizer = ShardOptimizer(optimizer, arena, self._shared.states)
        self._owner = Owner(self._together, arena, self._optimizer)
        self._collector = GradientCollector(self._shared.trained, arena, self._replica)
        self._sums = SharedSums(self._together, arena)
        self._ranks: tuple[int, ...] = ()
        self._exact_statistics = place.strategy.batchnorm == "exact"
        self._statistics = Statistics()
        self._undo_exact = make_exact(model, self._statistics)
        if self._shared.users_state and not self.joining:
            self.once(lambda: self._optimizer.take_state(self._shared.users_state))

    # ── ops ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def chief(self) -> bool:
        return self._together.is_chief()

    def once(self, act: Callable[[], None]) -> None:
        self._together.once(act)

    def _share(self, members: Members) -> Share:
        return Share(members.ranks.index(self._replica), len(members.ranks))

    def share(self) -> Share:
        return self._share(self._together.coming())

    def expect(self, steps: int) -> None:
        self._board.host_set(HostWord.TOTAL_STEPS, steps)

    @contextmanager
    def one_pass(self, *, is_last: bool, among: Sequence[int]) -> Iterator[None]:
        self._collector.last_pass(is_last)
        if self._exact_statistics and len(among) > 1:
            ranks = [self._ranks[index] for index in among]
            self._statistics.sum = lambda values: self._sums.sum(values, ranks)
        try:
            yield
        finally:
            self._statistics.sum = None

    def step(self, number: int, compute: Callable[[Share], Computed], clip_norm: float | None) -> Closed:
        board, me = self._board, self._replica
        board.set(me, Word.STEP, number)
        began = time.monotonic_ns()
        buffers_before = [buffer.clone() for buffer in self._shared.buffers]

        def one_try(members: Members) -> tuple[Members, int]:
            board.work_on(members, Kind.STEP, Phase.COMPUTING)
            self._owner.divide(members.ranks)
            self._ranks = members.ranks
            for buffer, before in zip(self._shared.buffers, buffers_before, strict=True):
                buffer.copy_(before)
            self._sums.begin(members)
            self._collector.begin()
            computed = compute(self._share(members))
            self._collector.finish()
            self._report(computed)
            if members.chief == me:
                self._chief_duties(members)
            computed_at = time.monotonic_ns()
            self._together.arrive(members, Phase.AWAITING_GRADIENTS)
            return members, computed_at

        members, computed_at = self._together.attempt(one_try)
        # From here on the step is decided: it will be completed by whoever is left.
        arrived_at = time.monotonic_ns()
        board.enter(me, Phase.UPDATING)
        self._check_options(members)
        closed = Closed(
            loss=sum(board.get_float(rank, Word.LOSS) for rank in members.ranks),
            samples=sum(board.get(rank, Word.SAMPLES) for rank in members.ranks),
            count=len(members.ranks),
            stop=board.host_get(HostWord.STOP_AFTER) == members.op,
        )
        if not self._exact_statistics:
            self._shared.take_buffers()
        self._owner.begin(self._arena.touched[list(members.ranks)].amax(0))
        if self.gradients_ready is not None and members.chief == me:
            self.gradients_ready()
        scale = 1.0
        if clip_norm is not None:
            scale = min(1.0, clip_norm / (self._owner.norm(members) + 1e-6))
        self._owner.update(members, scale)
        board.host_set(HostWord.CLOSED, members.op)
        now = time.monotonic_ns()
        board.set(me, Word.COMPUTE_NS, computed_at - began)
        board.set(me, Word.WAIT_NS, arrived_at - computed_at)
        board.set(me, Word.UPDATE_NS, now - arrived_at)
        board.set(me, Word.SAMPLES_SEEN, board.get(me, Word.SAMPLES_SEEN) + closed.samples)
        board.set(me, Word.STEP, number + 1)
        board.enter(me, Phase.BETWEEN)
        return closed

    def _report(self, computed: Computed) -> None:
        self._optimizer.refresh_options()
        self._board.set_float(self._replica, Word.LOSS, computed.loss)
        self._board.set(self._replica, Word.SAMPLES, computed.samples)
        self._board.set(self._replica, Word.OPTIONS, self._optimizer.options_fingerprint())

    def _check_options(self, members: Members) -> None:
        mine = self._board.get(self._replica, Word.OPTIONS)
        for other in members.ranks:
            if self._board.get(other, Word.OPTIONS) != mine:
                raise ModelError(
                    "optimizer",
                    f"the options of replica {other}",
                    f"they differ from replica {self._replica}'s (learning rate, momentum …); change them alike "
                    "in every replica, and give a scheduler to Trainer(scheduler=…) so that it is restored",
                )

    def _chief_duties(self, members: Members) -> None:
        """Decisions that hold from this step on: written before the chief arrives, read after all have."""
        board = self._board
        if board.host_get(HostWord.STOP_REQUESTED) and not board.host_get(HostWord.STOP_AFTER):
            board.host_set(HostWord.STOP_AFTER, members.op)
        joining = board.any_joining()
        if joining or not self._exact_statistics:
            self._shared.publish_buffers()
        if joining:
            self._arena.write_notes(self.notes_for_joining())
            board.admit_joining(members.op)

    def total(self, compute: Callable[[Share], torch.Tensor]) -> torch.Tensor:
        def one_try(members: Members) -> torch.Tensor:
            self._board.work_on(members, Kind.EVALUATE, Phase.EVALUATING)
            self._sums.begin(members)
            return self._sums.sum(compute(self._share(members)), members.ranks)

        total = self._together.attempt(one_try)
        self._board.enter(self._replica, Phase.BETWEEN)
        return total

    # ── joining a run in progress ────────────────────────────────────────────────────────────────────────

    def join(self) -> dict[str, Any]:
        """Wait to be admitted. Returns the chief's notes on the step after which this replica takes part."""
        board, me = self._board, self._replica
        incarnation = board.get(me, Word.INCARNATION)
        board.set(me, Word.JOINING, incarnation)

        def admitted() -> bool:
            if not any(board.alive(rank) for rank in range(board.replicas)):
                raise SystemExit(0)  # the others have finished meanwhile
            return board.get(me, Word.ADMITTED) == incarnation and (
                board.host_get(HostWord.CLOSED) >= board.get(me, Word.ADMIT_AT) - 1
            )

        board.wait(me, Phase.AWAITING_ADMISSION, admitted, self._together.timeout_s)
        board.set(me, Word.OP, board.get(me, Word.ADMIT_AT) - 1)
        self._shared.take_buffers()
        notes = self._arena.read_notes()
        board.set(me, Word.JOINING, 0)
        self.joining = False
        return notes

    # ── whole tensors ────────────────────────────────────────────────────────────────────────────────────

    def gradients(self) -> dict[str, torch.Tensor]:
        """The step's summed gradients by parameter name, while the step is open."""
        op = self._board.get(self._replica, Word.OP)
        touched = self._arena.touched.amax(0)
        found = {}
        for number, slot in enumerate(self._shared.layout.slots):
            if slot.group is not None and touched[number]:
                ranks = self._board.members(self._replica, op).ranks
                parts = torch.stack([self._arena.gradient(rank, slot) for rank in ranks])
                found[slot.name] = parts.sum(0)
        return found

    def optimizer_state(self) -> StateByName:
        slots = self._shared.layout.slots
        return {slots[number].name: state for number, state in self._optimizer.give_state().items()}

    def take_state(self, model: dict[str, torch.Tensor], optimizer: StateByName) -> None:
        numbers = {slot.name: number for number, slot in enumerate(self._shared.layout.slots)}
        # Buffers are every replica's own; parameters and optimizer state lie once, and the chief fills them in.
        shared = {slot.name for slot in self._shared.layout.slots}
        own_state(self._model).load_state_dict({k: v for k, v in model.items() if k not in shared}, strict=False)

        def fill() -> None:
            own_state(self._model).load_state_dict(model)
            self._optimizer.take_state({numbers[name]: state for name, state in optimizer.items()})

        self.once(fill)
        self._optimizer.forget()

    def close(self) -> None:
        self._collector.close()
        self._undo_exact()
        self._arena.arena.close()
