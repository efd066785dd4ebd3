"""Cuts whose devices each have tasks of the graph of the loss: stages, and cells in waves.

The last device finds the loss; all others send on what they have computed, and get gradients of that. Whatever a device
finds for a parameter is a summand of the parameter's gradient, so weights that are used on several devices, or by the
loss itself, need nothing special.

Outside of training every device gets all that is returned.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from paceline.errors import ModelError
from paceline.exchange.mailboxes import Peers
from paceline.exchange.packing import pack, receive, send
from paceline.graph.call_graph import CallGraph
from paceline.loss_value import NOTHING, LossPart, Weight
from paceline.optim.postponed import Postponed
from paceline.split.cut import SAME, WHOLE, Check, Loss, TensorPart
from paceline.split.graph_cut import GraphCut
from paceline.split.tasks import DeviceTasks, Flight


@dataclass
class InFlight:
    """A flight with the tasks it goes through, and the loss that its backward begins with, on the last device."""

    tasks: DeviceTasks
    flight: Flight
    loss: torch.Tensor | None
    later: Postponed

    def backward(self, most_backwards: int | None = None) -> None:
        """Gradients of weights may come later; those of the last `most_backwards`, or all."""
        with self.later.backward(most_backwards):
            if self.loss is not None:
                self.loss.backward()  # type: ignore[no-untyped-call]
            self.tasks.backward(self.flight)


class TaskCut(GraphCut):
    """One device of a model that is cut into tasks."""

    device_of: dict[str, int]  # by parameter or buffer, the first device that uses it, after `decide`
    _used_on: dict[str, set[int]]  # all of them

    def __init__(self, peers: Peers) -> None:
        super().__init__(peers)
        self.later = Postponed()

    @property
    def speaks(self) -> bool:
        return self.peers.rank == self.peers.count - 1

    def part_of(self, name: str) -> TensorPart:
        if name in dict(self.model.named_buffers()):
            here = self.peers.here  # of each host one device tells, of those that use it if there are some
            teller = min(self._used_on.get(name, set()) & set(here), default=here.start)
            return WHOLE if teller == self.peers.rank else SAME
        return WHOLE  # no two devices find the same: what this one finds is a summand, and mostly nothing

    def note_devices(self, call: CallGraph, task_of: dict[fx.Node, int]) -> None:
        """Notes on which devices parameters and buffers are, by the graph that all is decided by."""
        tasks = {name: {task_of[user] for user in node.users if user in task_of} for name, node in call.tensors.items()}
        self.device_of = {name: min(found) % self.peers.count for name, found in tasks.items() if found}
        self._used_on = {name: {task % self.peers.count for task in found} for name, found in tasks.items() if found}

    def devices_using(self, name: str) -> Set[int]:
        return self._used_on.get(name, set())

    def check_hosts(self, call: CallGraph, task_of: dict[fx.Node, int], changed: set[str], advice: str) -> None:
        """Refuses a graph, of a replica on several hosts, that would compute with values that are newer on another
        one."""
        if not self.peers.is_spread:
            return
        for name, node in call.tensors.items():
            devices = {task_of[user] % self.peers.count for user in node.users if user in task_of}
            hosts = self.peers.hosts_of(devices)
            if name in changed and len(hosts) > 1:
                expected = f"training changes its buffer {name}, which stages of several hosts use, {advice}"
                raise ModelError("model", type(self.model).__name__, expected)
            if not set(hosts) <= set(self.peers.hosts_of(self._used_on.setdefault(name, devices))):
                expected = f"called like this it would need {name} on another host than at first, {advice}"
                raise ModelError("model", type(self.model).__name__, expected)

    def check_buffers(self, call: CallGraph, task_of: dict[fx.Node, int], changed: set[str], advice: str) -> None:
        """Refuses a graph that changes a buffer on another device than the first one did."""
        for name in changed & call.tensors.keys():
            used_on = {task_of[user] % self.peers.count for user in call.tensors[name].users if user in task_of}
            if used_on - {self.device_of.get(name, 0)}:
                raise ModelError(
                    "model",
                    type(self.model).__name__,
                    f"called like this it would need buffer {name} on another device than at first, {advice}",
                )

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────────

    def train(self, loss: Loss, model: nn.Module, batch: Any, weight: Weight, check: Check) -> LossPart:
        self.begin()
        flight, part = self.forward(loss, batch, weight, check)
        flight.backward()
        self.later.do_all()
        return part

    def begin(self) -> None:
        """Begins a pass."""
        self.passes += 1
        self.later.forget()
        self.peers.while_waiting(self.later.do_one)

    def forward(self, loss: Loss, batch: Any, weight: Weight, check: Check) -> tuple[InFlight, LossPart]:
        """Runs forward. Returns what runs backward, and what this is of the step's loss, on the last device."""
        kind, inputs = self.kind_of(loss, batch)
        self.look(kind, batch)
        assert isinstance(kind.compute, ComputeTasks)
        tasks = kind.compute.tasks
        flight = tasks.begin(inputs, self.tensors)
        returned = tasks.forward(flight)
        if not self.speaks:
            return InFlight(tasks, flight, None, self.later), NOTHING
        found = check(kind.call.structure.fill(returned))
        return InFlight(tasks, flight, found.weighted(weight), self.later), found.part(weight)

    def everything_returned(self, tasks: DeviceTasks, inputs: list[torch.Tensor]) -> list[Any]:
        """Runs all tasks. Returns what the graph returns, on every device."""
        returned = tasks.forward(tasks.begin(inputs, self.tensors))
        last = self.peers.count - 1
        if not self.speaks:
            return list(receive(self.peers, last)[0])
        for other in range(last):
            send(self.peers, pack(returned), other)
        return returned


@dataclass
class ComputeTasks:
    """This device's tasks of one graph, to be called outside of training."""

    cut: TaskCut
    tasks: DeviceTasks

    def __call__(self, inputs: list[torch.Tensor]) -> list[Any]:
        return self.cut.everything_returned(self.tasks, inputs)
