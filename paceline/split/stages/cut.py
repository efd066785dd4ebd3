"""A model cut by layer: a device computes its stage of the graph of the loss, one task of each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from paceline.errors import DataError
from paceline.exchange.mailboxes import Peers
from paceline.graph.call_graph import CallGraph
from paceline.graph.kept import KeptGraph
from paceline.loss_value import NOTHING, LossPart, Weight
from paceline.optim.batchnorm import statistics_of
from paceline.seeds import mixed
from paceline.split import values
from paceline.split.cut import Check, Loss
from paceline.split.stage_schedule import FORWARD, order
from paceline.split.stages import divide
from paceline.split.stages.measure import measure, measured_before
from paceline.split.stages.micro_batches import length_of, micro_batches, part_of
from paceline.split.task_cut import ComputeTasks, InFlight, TaskCut
from paceline.split.tasks import DeviceTasks

_ELSEWHERE = "cut it elsewhere with --cut-at"


class StagesCut(TaskCut):
    """One stage of a pipeline, on the device that has it."""

    quickens_calls = False  # one batch goes through one stage after the other

    def __init__(self, split: values.Stages, peers: Peers) -> None:
        super().__init__(peers)
        self._split = split
        self._first_call: CallGraph | None = None  # that was measured
        self._first: list[str] = []  # its operators
        self._places: list[int] = []
        self._random: list[int] = []
        self._drawing: set[str] = set()  # operators that draw random numbers
        self._changed: set[str] = set()  # buffers that training changes
        self._seed: int | None = None  # of the micro-batch

    # ── who does what ────────────────────────────────────────────────────────────────────────────────────

    def sized(self, given: Any) -> Any:
        """Returns as much as a micro-batch."""
        length = length_of(given)
        size = -(-length // self._split.micro_batches)
        return part_of(given, length, 0, size) if 0 < size < length else given

    def decide(self, kept: KeptGraph, values: list[torch.Tensor]) -> None:
        call = self._first_call = kept.graph
        self._first = [str(node.target) for node in call.nodes]
        names = self._split.cut_at
        named = divide.at_modules(self.model, call, names)  # on every device: what is wrong is said at once
        buffers = [name for name, _ in self.model.named_buffers()]
        decision = None
        if self.peers.first:  # replicas have to be cut alike: those that have the same layer share its statistics
            measured = measured_before(kept) or measure(self.model, kept, values)
            divide.check(measured, named, names)
            places = named or divide.by_cost(call, measured, self._split.stages)
            decision = [places, measured.random, [buffers.index(name) for name in measured.changed]]
        self._places, self._random, changed = (
            self.peers.tell_all(decision[number] if decision is not None else None) for number in range(3)
        )
        self._changed = {buffers[number] for number in changed}
        self._drawing = {str(call.nodes[number].target) for number in self._random}
        self.note_devices(call, _stages(call, self._places))
        self.check_hosts(call, _stages(call, self._places), self._changed, _ELSEWHERE)

    def open(self, call: CallGraph) -> ComputeTasks:
        if [str(node.target) for node in call.nodes] == self._first:
            places, random = self._places, self._random
        else:
            places = divide.follow(call, self.device_of, self._split.stages)
            random = [number for number, node in enumerate(call.nodes) if str(node.target) in self._drawing]
        if call is not self._first_call:  # the same operators may be of other tensors
            self.check_buffers(call, _stages(call, places), self._changed, _ELSEWHERE)
            self.check_hosts(call, _stages(call, places), self._changed, _ELSEWHERE)
        between = {call.nodes[number]: partial(self._draw_for, number) for number in random}
        stage_of, statistics = _stages(call, places), statistics_of(self.model)
        tasks = DeviceTasks(call, stage_of, self.peers.count, self.peers, between, statistics)
        return ComputeTasks(self, tasks)

    def _draw_for(self, number: int) -> None:
        """Random numbers of training follow from the micro-batch and the operator: where a model is cut makes no
        difference to its dropout. Otherwise they are whatever comes next."""
        if self._seed is not None:
            torch.default_generator.manual_seed(mixed(self._seed, number))

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────

    def train(self, loss: Loss, model: nn.Module, batch: Any, weight: Weight, check: Check) -> LossPart:
        pieces = micro_batches(batch, self._split.micro_batches)
        if len(pieces) < self._split.micro_batches:
            self._check_statistics(model, len(pieces))
        # The same on all devices of the replica, now and, after having drawn different things, at the end.
        seed = int(torch.randint(2**62, ()))
        flights: dict[int, InFlight] = {}
        self.begin()
        total = NOTHING
        for what, number in order(self._split.schedule, self.peers.rank, self.peers.count, len(pieces)):
            if what == FORWARD:
                piece, share = pieces[number]
                self._seed = mixed(seed, number)
                torch.default_generator.manual_seed(self._seed)
                flights[number], part = self.forward(loss, piece, weight.part(share), check)
                total = total + part
            else:
                flights.pop(number).backward(self._split.stages)
        self.later.do_all()
        self._seed = None
        torch.default_generator.manual_seed(mixed(seed, -1))
        return total

    def _check_statistics(self, model: nn.Module, count: int) -> None:
        """Refuses fewer micro-batches than on other replicas, where they share statistics."""
        if any(statistics.sum is not None for statistics in statistics_of(model).values()):
            raise DataError(
                "batch size",
                f"{count} samples on a replica in the last batch",
                f"with BatchNorm every replica needs {self._split.micro_batches} samples, one a micro-batch; "
                "give fewer micro-batches, or drop_last=True",
            )


def _stages(call: CallGraph, places: Sequence[int]) -> dict[fx.Node, int]:
    """Returns the stage of every operator."""
    return {node: sum(place <= number for place in places) for number, node in enumerate(call.nodes)}
