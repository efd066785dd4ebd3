"""How much of the model a process has: all of it, or one device's part of a replica that is cut over several.

That decides where its gradients go, what its share of a batch is, whether its loss counts, and how buffers (BatchNorm's
running statistics and others) are kept the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from paceline.errors import ModelError
from paceline.exchange.members import Members
from paceline.exchange.together import Together
from paceline.exchange.words import HostWord, Kind, Phase
from paceline.loop.lockstep import BatchShare
from paceline.loss_value import LossPart, Weight
from paceline.mirrored.old_values import OldValues
from paceline.mirrored.one_host import OneHost
from paceline.mirrored.shared_model import SharedModel
from paceline.mirrored.statistics import BatchStatistics
from paceline.mirrored.step_parts import DecidedStep, StepPart
from paceline.optim.gradients import Destination, GradientCollector, IntoBuffer
from paceline.optim.models import lent, own_state
from paceline.split.called_cut import EarlyCalls
from paceline.split.cut import Check, Cut, Function, Loss, train
from paceline.split.parts import Parts


class WholeModel(StepPart):
    """A replica that has all of the model."""

    devices = 1
    speaks = True  # its loss and its metrics count

    def __init__(self, model: nn.Module, shared: SharedModel, together: Together, hosts: OneHost) -> None:
        self._model, self._shared, self._together, self._hosts = model, shared, together, hosts
        self._row = together.replica
        self.collector = GradientCollector(self._sources(), self._destinations(), hosts.landed)
        self._tried = 0  # the op that was tried last
        self._buffers_before: list[torch.Tensor] = []

    @property
    def computed_with(self) -> nn.Module:
        """Returns the model that forward and backward run on."""
        return self._model

    def _sources(self) -> list[nn.Parameter]:
        """Returns the parameters of that which are trained."""
        return self._shared.trained

    def _destinations(self) -> list[Destination]:
        arena, slots = self._shared.arena, self._shared.layout.slots
        return [IntoBuffer(arena.gradient(self._row, slot)) for slot in slots[: len(self._shared.trained)]]

    def share(self, members: Members) -> BatchShare:
        """Returns this process's share of a step of these members."""
        return self._hosts.share(members, members.ranks.index(self._row), len(members.ranks))

    def prepare(self, function: Function, given: Any, statistics: BatchStatistics) -> None:
        """There is nothing to cut."""

    def compute(self, function: Function, given: Any) -> Any:
        """Returns `function(model, given)`."""
        return function(self.computed_with, given)

    def meet_devices(self) -> None:
        """Returns when all devices of this replica are about to compute together what is no step and no evaluation."""

    def old_values_allowed(self) -> AbstractContextManager[None]:
        """Inside, the model may be used though other hosts have newer values of some parameters."""
        return nullcontext()

    def settling(self) -> None:
        """Other hosts take over what lies in the arena."""

    def settled(self) -> None:
        """Other hosts have changed what lies in the arena."""
        self.closed()

    def train(self, loss: Loss, batch: Any, weight: Weight, check: Check) -> LossPart:
        """Runs forward and backward of one pass."""
        return train(loss, self.computed_with, batch, weight, check)

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, members: Members, number: int) -> None:
        if members.op == self._tried:
            self.put_buffers_back()
        else:
            self._tried = members.op
            self._buffers_before = [buffer.clone() for buffer in self._shared.buffers]

    def put_buffers_back(self) -> None:
        """A try that was given up may have changed running statistics."""
        for buffer, before in zip(self._shared.buffers, self._buffers_before, strict=True):
            buffer.copy_(before)

    def mark(self, used: list[bool]) -> None:
        """Notes which parameters this process has a gradient for."""
        self._shared.arena.touched[self._row, : len(used)] = torch.tensor(used, dtype=torch.uint8)

    def rows(self, members: Members) -> dict[int, list[int]] | None:
        """Returns by member which of its gradients there are; None: whatever it has not is zero."""
        return None

    def publish_buffers(self) -> None:
        """The first member leaves its own for the others, who are at it or about to join."""
        self._shared.publish_buffers()

    def agree(self, step: DecidedStep) -> None:
        if self._together.board.host_get(HostWord.BUFFERS_OF) == step.members.op:
            self.take_buffers()

    def take_buffers(self) -> None:
        total = self._hosts.sum if self._hosts.sums_gradients else None
        self._shared.take_buffers(total, first=self._hosts.leads)

    # ── whole tensors ────────────────────────────────────────────────────────────────────────────────────

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the model's own state_dict."""
        return own_state(self._model).state_dict()

    def take_state(self, model: dict[str, torch.Tensor], fill: Callable[[], None], elsewhere: set[str]) -> None:
        """Takes over a state_dict, of which `elsewhere` names what other parts have; `fill` does what one process has
        to do for all."""
        own = own_state(self._model)
        # Buffers are every replica's own; parameters lie once, and the first member fills them in.
        shared = {slot.name for slot in self._shared.layout.slots}
        own.load_state_dict({key: value for key, value in model.items() if key not in shared}, strict=False)

        def act() -> None:
            missing = set(own.load_state_dict(model, strict=not elsewhere).missing_keys)
            if missing != elsewhere:
                raise ModelError("model", sorted(missing - elsewhere)[0], "it is not in the checkpoint")
            fill()

        self._together.once(act)

    def close(self) -> None:
        self.collector.close()


class CutModel(WholeModel):
    """One device of a replica whose model is cut."""

    def __init__(self, cut: Cut, model: nn.Module, shared: SharedModel, together: Together, hosts: OneHost) -> None:
        self._cut = cut
        self.devices, self.speaks = cut.peers.count, cut.speaks
        self._parts = Parts(cut, shared, together.replica, model)
        self._early = EarlyCalls(cut, model)
        self._old_values = OldValues(model, hosts)
        self._prepared = False
        super().__init__(model, shared, together, hosts)

    def share(self, members: Members) -> BatchShare:
        return self._hosts.share(members, self._row // self.devices, len(members.ranks) // self.devices)

    def prepare(self, function: Function, given: Any, statistics: BatchStatistics) -> None:
        if self._prepared:
            return
        self._early.end()
        self._cut.prepare(function, self._model, given)
        self._prepared = True
        statistics.over_devices(self._cut.over_devices)
        # What is computed with are other tensors from here on: gradients are waited for anew.
        self.collector.close()
        self.collector = GradientCollector(*self._parts.take(), fresh=True)
        self._parts.publish_buffers()
        names = [name for name, _ in own_state(self._model).named_buffers()]
        places = [place for place, _ in self._shared.buffer_places()]
        self._hosts.divided(self._cut.devices_using, list(zip(names, places, strict=True)))
        self._together.meet(Kind.BUILD, Phase.AWAITING_DEVICES)

    def train(self, loss: Loss, batch: Any, weight: Weight, check: Check) -> LossPart:
        with self._old_values.allowed():  # to hold a graph against the loss, both with the same
            return self._cut.train(loss, self._model, batch, weight, check)

    def compute(self, function: Function, given: Any) -> Any:
        if not self._hosts.has_all:  # other hosts need not come, and no batch is computed sooner by several stages
            with lent(self._model, self._hosts.newest()), self._old_values.allowed():
                return function(self._model, given)
        return self._cut.call(function, self._model, given) if self._prepared else self._early.call(function, given)

    def meet_devices(self) -> None:
        if self._hosts.has_all:
            first = self._cut.peers.first_row
            self._together.ask(range(first, first + self.devices))

    def old_values_allowed(self) -> AbstractContextManager[None]:
        return self._old_values.allowed()

    def settling(self) -> None:
        self._parts.publish_buffers()  # a script may have written to them since the step

    def settled(self) -> None:
        self.take_buffers()

    def mark(self, used: list[bool]) -> None:
        self._parts.mark(used, self._shared.arena.touched[self._row])

    def rows(self, members: Members) -> dict[int, list[int]] | None:
        return {rank: self._shared.arena.touched[rank].tolist() for rank in members.ranks}

    def computed(self, members: Members, number: int) -> None:
        self._parts.publish_buffers()  # each device those that are its to tell

    def agree(self, step: DecidedStep) -> None:
        self.take_buffers()  # the model of every device is whole
        if self._hosts.sums_gradients and self._together.board.host_get(HostWord.BUFFERS_OF) == step.members.op:
            self._parts.take_buffers(self._hosts.sum, first=self._hosts.leads)

    def publish_buffers(self) -> None:
        """All have."""

    def take_buffers(self) -> None:
        self._parts.take_buffers()

    def state(self) -> dict[str, torch.Tensor]:
        return self._parts.whole_state()

    def take_state(self, model: dict[str, torch.Tensor], fill: Callable[[], None], elsewhere: set[str]) -> None:
        def act() -> None:
            missing = sorted(set(own_state(self._model).state_dict()) - set(model) - elsewhere)
            if missing:
                raise ModelError("model", missing[0], "it is not in the checkpoint")
            self._parts.take_state(model)
            fill()

        self._together.once(act)
        self._parts.take_buffers()
        self._together.meet(Kind.SAVE, Phase.AWAITING_SAVE)

    def close(self) -> None:
        self._old_values.close()
        self._cut.peers.close()
        super().close()
