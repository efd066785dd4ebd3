"""One device's tasks of a graph: what it gets for them, what it computes, what it hands on; and the way back.

Every operator of the graph belongs to a task. Tasks are numbered so that values go from lower numbers to higher ones
only, and device d of n has the tasks d, n + d, 2n + d …, which it does one after another:

    stages      one task a device: a stage
    wavefront   one for every block of time and device; here with two devices, of which the last finds the loss

                device 0   0 ──▶ 2 ──▶ 4
                             ╲     ╲     ╲
                device 1      ▶ 1 ──▶ 3 ──▶ 5

Backward goes through the tasks in the opposite order. What a task has got, from another device or from an earlier task
of this one, is a leaf of its own autograd graph. A value goes to a device once, however many tasks there need it, and
its gradient comes back once, when they all have run backward.

Others wait for the gradients of what they have handed on, and nobody for those of weights: the products that these are
come later, while this device would wait for another, or at the end (`optim/postponed.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from paceline.exchange.mailboxes import Peers
from paceline.exchange.packing import pack, receive, send
from paceline.graph.call_graph import CallGraph
from paceline.graph.operators import given, name_of
from paceline.optim import direct_gradients
from paceline.optim.batchnorm import Statistics, batch_norm
from paceline.torch_private import tree_leaves, tree_map


@dataclass(frozen=True, eq=False)
class _Message:
    """What a task gives to another device, for all that is to be done there."""

    task: int
    source: int
    target: int
    nodes: list[fx.Node]
    needed: int  # the first task over there that needs some of it


@dataclass
class Flight:
    """A batch, or a part of one, between its forward and its backward."""

    values: dict[fx.Node, Any]  # what tasks can use: inputs, parameters, and what was found and got so far
    edges: dict[fx.Node, list[GradientEdge]] = field(default_factory=dict)  # of what a task here has handed on
    gradients: dict[_Message, list[Any]] = field(default_factory=dict)  # come back, of what was given to others


class _Task:
    """Some operators, and what goes in and out."""

    def __init__(self, number: int, nodes: list[fx.Node], keeps: list[fx.Node]) -> None:
        mine = set(nodes)
        self.number = number
        self.nodes = nodes
        self.keeps = keeps  # what is needed outside of it
        self.arguments = list(dict.fromkeys(s for node in nodes for s in node.all_input_nodes if s not in mine))
        self.run: Callable[..., tuple[Any, ...]]
        self.takes: list[_Message] = []  # what has to be there before
        self.gives: list[_Message] = []
        self.ends: list[_Message] = []  # whose gradients are complete when this one has run backward


class DeviceTasks:
    """What a device does of a graph."""

    def __init__(
        self,
        call: CallGraph,
        task_of: Mapping[fx.Node, int],
        count: int,
        peers: Peers,
        between: Mapping[fx.Node, Callable[[], None]],
        statistics: Mapping[str, Statistics],
    ) -> None:
        """`task_of` every operator; there are `count` tasks, as many on each device, and the last one returns what the
        graph does. `between`: what is to be called before an operator."""
        self.call = call
        self._peers = peers
        self._returned = [value for value in call.returned if isinstance(value, fx.Node)]
        users = {
            node: {task_of.get(user, count - 1) for user in node.users if task_of.get(user, count - 1) != task_of[node]}
            for node in call.nodes
        }
        # What others need of a task, and what the graph returns: found in the last task, or got by it.
        keeps: dict[int, list[fx.Node]] = {}
        nodes: dict[int, list[fx.Node]] = {}
        for node in call.nodes:
            nodes.setdefault(task_of[node], []).append(node)
            if users[node] or (node in self._returned and task_of[node] == count - 1):
                keeps.setdefault(task_of[node], []).append(node)
        own = range(peers.rank, count, peers.count)
        self._tasks = [_Task(number, nodes.get(number, []), keeps.get(number, [])) for number in own]
        for task in self._tasks:
            for node in task.nodes:
                _make_local(node, statistics)
            task.run = call.runs(task.nodes, task.arguments, task.keeps, between)
        # Which are needed here again, by a later task.
        self._again = {node for task in self._tasks for node in task.keeps if any(user in own for user in users[node])}
        self._deliver(keeps, users)

    def _deliver(self, keeps: Mapping[int, list[fx.Node]], users: Mapping[fx.Node, set[int]]) -> None:
        """Finds all messages of this device, and when they are sent and taken."""
        rank, devices = self._peers.rank, self._peers.count
        own = {task.number: task for task in self._tasks}
        arriving: dict[int, list[_Message]] = {}
        self._coming_back: dict[int, list[_Message]] = {}  # by device: in the order in which gradients come
        for task, kept in sorted(keeps.items()):
            source = task % devices
            for target in range(devices):
                if target == source or rank not in (source, target):
                    continue
                there = {node: [user for user in users[node] if user % devices == target] for node in kept}
                needed = [node for node in kept if there[node]]
                if not needed:
                    continue
                first = min(user for node in needed for user in there[node])
                message = _Message(task, source, target, needed, first)
                if source == rank:
                    own[task].gives.append(message)
                    self._coming_back.setdefault(target, []).append(message)
                else:
                    arriving.setdefault(source, []).append(message)
        for messages in self._coming_back.values():
            messages.sort(key=lambda message: (-message.needed, -message.task))
        for messages in arriving.values():
            for message in reversed(messages):
                own[message.needed].ends.append(message)
            for one in self._tasks:  # in the order in which they are sent, so with what is needed only later
                until = max((n for n, message in enumerate(messages) if message.needed <= one.number), default=-1)
                one.takes += messages[: until + 1]
                del messages[: until + 1]

    # ── forward ──────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, inputs: list[torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> Flight:
        """Returns a flight that is given this; `tensors` are the parameters and buffers, by name."""
        values: dict[fx.Node, Any] = dict(zip(self.call.inputs, inputs, strict=True))
        values |= {node: tensors[name] for name, node in self.call.tensors.items()}
        return Flight(values | self.call.constants)

    def forward(self, flight: Flight) -> list[Any]:
        """Does all tasks. Returns, on the last device, what the graph returns."""
        values = flight.values
        for task in self._tasks:
            for message in task.takes:
                values.update(zip(message.nodes, receive(self._peers, message.source)[0], strict=True))
            found = task.run(*(values[node] for node in task.arguments))
            for node, value in zip(task.keeps, found, strict=True):
                values[node] = value
                if torch.is_grad_enabled():
                    flight.edges[node] = [get_gradient_edge(tensor) for tensor in _tracked(value)]
                    values[node] = tree_map(_leaf, value) if node in self._again else value
            for message in task.gives:
                send(self._peers, pack([values[node] for node in message.nodes]), message.target)
            for node in task.keeps:
                if node not in self._again and node not in self._returned:
                    del values[node]
        return [values[node] for node in self._returned] if self._peers.rank == self._peers.count - 1 else []

    # ── backward ─────────────────────────────────────────────────────────────────────────────────────────

    def backward(self, flight: Flight) -> None:
        """Goes back through all tasks; on the last device after the backward of what was returned."""
        given_back = {
            target: deque(message for message in messages if any(flight.edges[node] for node in message.nodes))
            for target, messages in self._coming_back.items()
        }
        for task in reversed(self._tasks):
            arrived: list[tuple[GradientEdge, Any]] = []
            for node in task.keeps:
                if node in self._again:
                    leaves = _tracked(flight.values[node])
                    arrived += zip(flight.edges[node], [leaf.grad for leaf in leaves], strict=True)
            for message in task.gives:
                if given_away := [edge for node in message.nodes for edge in flight.edges[node]]:
                    found = self._gradients(flight, message, given_back[message.target])
                    arrived += zip(given_away, found, strict=True)
            pairs = [(edge, gradient) for edge, gradient in arrived if gradient is not None]
            if pairs:  # those of a value that several have used add up
                edges, gradients = zip(*pairs, strict=True)
                torch.autograd.backward(edges, gradients)
            for message in task.ends:
                if leaves := _tracked([flight.values[node] for node in message.nodes]):
                    send(self._peers, pack([leaf.grad for leaf in leaves]), message.source)

    def _gradients(self, flight: Flight, message: _Message, coming: deque[_Message]) -> list[Any]:
        """Returns the gradients of what was given away. Those of others may come first, and are kept."""
        while message not in flight.gradients:
            flight.gradients[coming.popleft()] = receive(self._peers, message.target)[0]
        return flight.gradients.pop(message)


def _tracked(value: Any) -> list[torch.Tensor]:
    """Returns the tensors of a value that may get a gradient."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def _make_local(node: fx.Node, statistics: Mapping[str, Statistics]) -> None:
    """Has an operator be the one that a module would have called: one that knows where its gradient goes, or over which
    replicas its statistics are."""
    name = name_of(node)
    if name == "linear":
        node.target = _linear
    elif name == "embedding":
        node.target = _embedding
    elif name == "addmm" and not node.kwargs:  # which would be factors
        node.target = direct_gradients.addmm
    elif name == "batch_norm" and (found := statistics.get((node.meta.get("modules") or [""])[-1])) is not None:
        a = given(node)
        names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
        node.args, node.kwargs = tuple(a[name] for name in names), {}
        node.target = _with(found)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    padding = None if padding_idx < 0 else padding_idx
    return F.embedding(indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


def _with(statistics: Statistics) -> Callable[..., torch.Tensor]:
    def normalize(*arguments: Any) -> torch.Tensor:
        return batch_norm(*(*arguments, statistics))

    return normalize
