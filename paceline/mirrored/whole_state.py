"""For checkpoints and recorders: whole tensors of a model whose parts lie with replicas, hosts and servers."""

from __future__ import annotations

import torch

from paceline.loop.run_state import StateByName
from paceline.mirrored.model_part import WholeModel
from paceline.mirrored.one_host import OneHost, OptimizerStates
from paceline.mirrored.shared_model import SharedModel
from paceline.mirrored.step_parts import DecidedStep, StepPart
from paceline.optim.shard_optimizer import ShardOptimizer


class WholeState:
    """What a run's steps have come to; asked for when the last of them is complete."""

    def __init__(
        self, shared: SharedModel, optimizer: ShardOptimizer, part: WholeModel, hosts: OneHost, elsewhere: StepPart
    ) -> None:
        """`elsewhere`: who has the parameters that do not lie with replicas."""
        self._shared, self._optimizer, self._part = shared, optimizer, part
        self._hosts, self._elsewhere = hosts, elsewhere
        self.kept: dict[str, torch.Tensor] = {}  # by hosts, for the checkpoint that is being written
        self._states_elsewhere: OptimizerStates = {}  # the same

    def collect(self, *, first: bool) -> None:
        """Brings what other hosts alone have to whoever saves; all processes call this."""
        self.kept = self._hosts.collect(first=first)
        self.collect_states()

    def collect_states(self) -> None:
        """Brings the optimizer state that other hosts alone have; all processes call this."""
        self._states_elsewhere = self._hosts.states(self._optimizer.give_state)

    def gradients(self, step: DecidedStep) -> dict[str, torch.Tensor]:
        """Returns those of the last step, summed over all replicas."""
        arena, slots = self._shared.arena, self._shared.layout.slots
        far = {slots[number].name: value for number, value in self._hosts.gradients_elsewhere().items()}
        here = {
            slot.name: self._hosts.gradient(step, arena, slot)
            for number, slot in enumerate(slots)
            if slot.group is not None and step.touched[number]
        }
        return self._elsewhere.gradients() | far | here

    def optimizer_state(self) -> StateByName:
        slots = self._shared.layout.slots
        given = self._optimizer.give_state() | self._states_elsewhere
        return self._elsewhere.read()[1] | {slots[number].name: state for number, state in given.items()}

    def model_state(self) -> dict[str, torch.Tensor]:
        return self._part.state() | self._elsewhere.read()[0]

    def take(self, model: dict[str, torch.Tensor], optimizer: StateByName) -> None:
        """Goes on from what a checkpoint has."""
        elsewhere = self._elsewhere.names()
        weights = {name: model[name] for name in elsewhere}
        states = {name: optimizer.get(name, {}) for name in elsewhere}
        numbers = {slot.name: number for number, slot in enumerate(self._shared.layout.slots)}

        def fill() -> None:
            self._elsewhere.put(weights, states)
            self._optimizer.take_state({numbers[k]: held for k, held in optimizer.items() if k not in elsewhere})

        self._part.take_state({key: value for key, value in model.items() if key not in elsewhere}, fill, elsewhere)
        self._optimizer.forget()
