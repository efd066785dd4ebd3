"""Cells that a loop uses at every step, cut by layer and time: a device has layers, and a task is a block of steps."""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import StrategyError
from paceline.exchange.mailboxes import Peers
from paceline.graph.call_graph import CallGraph
from paceline.graph.kept import KeptGraph
from paceline.graph.operators import changed_by
from paceline.optim.batchnorm import statistics_of
from paceline.split.stages.measure import measure, measured_before
from paceline.split.task_cut import ComputeTasks, TaskCut
from paceline.split.tasks import DeviceTasks, Flight
from paceline.split.values import Wavefront
from paceline.split.wavefront.cells import Cells, find_cells
from paceline.split.wavefront.dependencies import Dependencies
from paceline.split.wavefront.placement import Placement, Stacks
from paceline.split.wavefront.random_order import RandomOrder


class CellsCut(TaskCut):
    """One device's layers of the cells that are found in the graph of the loss."""

    def __init__(self, split: Wavefront, peers: Peers, no_module: str) -> None:
        """`no_module` says why there is no recurrent module to be cut instead."""
        super().__init__(peers)
        self._split = split
        self._no_module = no_module
        self._device_of_kind: dict[str, int] = {}

    def decide(self, kept: KeptGraph, values: list[torch.Tensor]) -> None:
        call = kept.graph
        dependencies = Dependencies(call)
        cells = find_cells(call, dependencies)
        stacks = Stacks(call, cells, dependencies)
        self._check(cells, stacks)
        dealt = None
        if self.peers.first:  # replicas are cut alike
            measured = measured_before(kept) or measure(self.model, kept, values)
            dealt = stacks.deal(measured.seconds, self.peers.count)
        for layer, device in zip(cells.layers, self.peers.tell_all(dealt), strict=True):
            self._device_of_kind |= dict.fromkeys(layer.kinds, device)
        placement = self._placement(call, cells, dependencies)
        for node, kind in cells.kinds.items():
            self._device_of_kind.setdefault(kind, placement.device[node])
        self.note_devices(call, placement.task_of)

    def _check(self, cells: Cells, stacks: Stacks) -> None:
        """Refuses what has too few layers."""
        if not cells.layers:
            expected = f"{self._no_module}, and its graph has no cell that a loop uses again at every step either"
            raise StrategyError("wavefront", self._split.parts, expected)
        most = max(len(stack) for stack in stacks.of_layers)
        if most < self.peers.count:
            raise StrategyError(
                "wavefront",
                self._split.parts,
                f"the cells that its loop uses at every step are {most} layer{'s' if most > 1 else ''}, of which none "
                "depends on one above it; give at most that many",
            )

    def _placement(self, call: CallGraph, cells: Cells, dependencies: Dependencies) -> Placement:
        return Placement(call, cells, dependencies, self._device_of_kind, self.peers.count, self._split.time_block)

    def open(self, call: CallGraph) -> ComputeTasks:
        dependencies = Dependencies(call)
        placement = self._placement(call, find_cells(call, dependencies), dependencies)
        names = call.names  # what a call only reads every device has
        changed = {names[operand] for node in call.nodes for operand in changed_by(node) if operand in names}
        self.check_buffers(call, placement.task_of, changed, "do not cut it, use --replicas")
        order = RandomOrder(call, lambda node: placement.device[node] == self.peers.rank)
        tasks = _TasksInOrder(
            call, placement.task_of, placement.count, self.peers, order.between(), statistics_of(self.model)
        )
        tasks.order = order
        return ComputeTasks(self, tasks)


class _TasksInOrder(DeviceTasks):
    """Tasks that draw random numbers as one process does."""

    order: RandomOrder

    def forward(self, flight: Flight) -> list[Any]:
        self.order.begin()
        returned = super().forward(flight)
        self.order.finish()
        return returned
