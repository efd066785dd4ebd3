"""On which device and in which block of time every operator of a graph is computed.

Layers are dealt out to devices, those that run at the same time (a *stack*: an encoder is one, its decoder another) so
that the slowest device is as fast as possible. All else is computed where, and when, it is first needed: the input's
share of a cell's gates with the cell, a select of one step's input in the block of that step. What no layer needs goes
to the last device, where the loss is. If a loop does more than the layers there, with weights of its own (the choice of
a word, and its loss), that counts as one more layer on top.

A block has `time_block` steps. Block and device make the number of a task, and whatever an operator needs is in its own
task or in one with a lower number. So what would have to come from a higher device in the same block puts its user into
the next block: any placement is right, and one that makes waves is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

from paceline.errors import ModelError
from paceline.graph.call_graph import CallGraph
from paceline.split.balance import even_bounds
from paceline.split.wavefront.cells import Cells
from paceline.split.wavefront.dependencies import Dependencies

_MOST_ROUNDS = 8


class Stacks:
    """The layers of a graph in groups that run at the same time."""

    def __init__(self, call: CallGraph, cells: Cells, dependencies: Dependencies) -> None:
        self._call, self._cells = call, cells
        self.of_layers: list[list[int]] = []  # numbers of layers, or one more for what is above all
        ends: list[int] = []
        for number, layer in enumerate(cells.layers):
            if not ends or layer.begin >= ends[-1]:
                self.of_layers.append([])
                ends.append(layer.end)
            self.of_layers[-1].append(number)
            ends[-1] = max(ends[-1], layer.end)
        top = len(cells.layers)
        self._home: dict[fx.Node, int] = {}  # the layer that an operator belongs to, or is needed by
        for node in reversed(call.nodes):
            needed_by = min((self._home[user] for user in dependencies.after[node]), default=top)
            self._home[node] = cells.layer_of.get(node, needed_by)
        above = [node for node in cells.time if self._home[node] == top and cells.kinds.get(node) in cells.repeated]
        if above and self.of_layers:
            self.of_layers[-1].append(top)

    def deal(self, seconds: Sequence[float], devices: int) -> list[int]:
        """Returns the devices of the layers, by what operators cost. Stacks of fewer layers are on the last devices."""
        cells, top = self._cells, len(self._cells.layers)
        costs = [0] * (top + 1)
        end = max(cells.time.values(), default=0)
        for node, cost in zip(self._call.nodes, seconds, strict=True):
            # What is done once, before the wave or after it, is nothing that devices could share.
            in_the_wave = cells.time.get(node, end) < end or cells.kinds.get(node) in cells.repeated
            costs[self._home[node]] += round(cost * 1e9) if in_the_wave else 0
        found = [devices - 1] * (top + 1)
        for stack in self.of_layers:
            bounds = even_bounds([costs[layer] for layer in stack], min(devices, len(stack)))
            for part in range(len(bounds) - 1):
                for layer in stack[bounds[part] : bounds[part + 1]]:
                    found[layer] = devices - (len(bounds) - 1) + part
        return found[:top]


class Placement:
    """A task for every operator."""

    def __init__(
        self,
        call: CallGraph,
        cells: Cells,
        dependencies: Dependencies,
        device_of_kind: Mapping[str, int],
        devices: int,
        time_block: int,
    ) -> None:
        """`device_of_kind`: where uses of weights are, as it was decided; a layer is where one of its kinds is."""
        self._nodes, self._cells, self._dependencies = call.nodes, cells, dependencies
        self._last = devices - 1
        self.device = self._devices(device_of_kind)
        block = self._blocks_in_time(time_block)
        self._blocks_before(block, max(block.values(), default=0))
        first = min(block.values(), default=0)
        self.task_of = {node: (block[node] - first) * devices + self.device[node] for node in self._nodes}
        self.count = (max(block.values(), default=0) - first + 1) * devices

    def _devices(self, device_of_kind: Mapping[str, int]) -> dict[fx.Node, int]:
        cells, last = self._cells, self._last
        of_layer = [
            next((device_of_kind[kind] for kind in layer.kinds if kind in device_of_kind), last)
            for layer in cells.layers
        ]
        fixed = {node: device_of_kind[kind] for node, kind in cells.kinds.items() if kind in device_of_kind}
        fixed |= {node: of_layer[layer] for node, layer in cells.layer_of.items()}
        groups = [*self._dependencies.together, *self._dependencies.on_one_device]
        for group in groups:
            wanted = {fixed[node] for node in group if node in fixed}
            if len(wanted) > 1:
                raise _torn(group[0])
            fixed |= dict.fromkeys(group, *wanted) if wanted else {}
        found: dict[fx.Node, int] = {}

        def go_through() -> None:
            for node in reversed(self._nodes):
                needed_on = (found[user] for user in self._dependencies.after[node])
                found[node] = fixed.get(node, min(needed_on, default=last))
            for group in groups:
                found.update(dict.fromkeys(group, min(found[node] for node in group)))

        self._until_stable(go_through, found)
        return found

    def _blocks_in_time(self, time_block: int) -> dict[fx.Node, int]:
        """Returns the blocks of all that follows from a layer's steps."""
        time, device = self._cells.time, self.device
        found: dict[fx.Node, int] = {}

        def go_through() -> None:
            for node in self._nodes:
                if node in time:
                    sources = (source for source in self._dependencies.before[node] if source in time)
                    after = [found[source] + (device[source] > device[node]) for source in sources]
                    found[node] = max([time[node] // time_block, found.get(node, 0), *after])
            for group in self._dependencies.together:
                if group[0] in time:
                    found.update(dict.fromkeys(group, max(found[node] for node in group)))

        self._until_stable(go_through, found)
        return found

    def _blocks_before(self, found: dict[fx.Node, int], last: int) -> None:
        """Adds the blocks of all else: each the latest in which it is early enough."""
        device, time = self.device, self._cells.time

        def go_through() -> None:
            for node in reversed(self._nodes):
                if node not in time:
                    users = self._dependencies.after[node]
                    found[node] = min((found[user] - (device[node] > device[user]) for user in users), default=last)
            for group in self._dependencies.together:
                if group[0] not in time:
                    found.update(dict.fromkeys(group, min(found[node] for node in group)))

        self._until_stable(go_through, found)

    def _until_stable(self, go_through: Callable[[], None], found: dict[fx.Node, int]) -> None:
        for _ in range(_MOST_ROUNDS):
            before = dict(found)
            go_through()
            if found == before:
                return
        group = next(iter(self._dependencies.together), self._nodes[:1])
        raise _torn(group[0])


def _torn(node: fx.Node) -> ModelError:
    where = (node.meta.get("modules") or [""])[-1]
    return ModelError(
        "wavefront",
        f"{node.name}{f' in {where}' if where else ''}",
        "it is changed in place by layers on several devices; give each its own tensor",
    )
