"""A model cut by layer: a device computes its stage of the graph of the loss.

In training every micro-batch goes through the stages, of which the last one finds the loss; all others send on what
they have computed. Backward goes the other way: a stage gets gradients of what it has sent, and sends those of what it
has got.

Whatever a stage finds for a parameter is a summand of the parameter's gradient, so weights that are used by several
stages, or by the loss itself, need nothing special.

Outside of training, the stages run one after another and every device gets all that is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from paceline.errors import DataError, ModelError
from paceline.exchange.mailboxes import Peers
from paceline.exchange.packing import pack, receive, send
from paceline.graph.call_graph import CallGraph
from paceline.loss_value import NOTHING, LossPart, Weight
from paceline.optim.batchnorm import statistics_of
from paceline.seeds import mixed
from paceline.split import values
from paceline.split.cut import SAME, WHOLE, Check, Loss, TensorPart
from paceline.split.graph_cut import GraphCut
from paceline.split.stages import divide
from paceline.split.stages.measure import buffers_used, measure
from paceline.split.stages.micro_batches import length_of, micro_batches, part_of
from paceline.split.stages.schedule import FORWARD, order
from paceline.split.stages.stage_part import StagePart


@dataclass
class _Flight:
    """A micro-batch between its forward and its backward."""

    seed: int
    weight: Weight
    taken: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # by stage: got from it, may get a gradient
    given: dict[int, list[GradientEdge]] = field(default_factory=dict)  # by stage: whose gradients it will send
    loss: torch.Tensor | None = None


class StagesCut(GraphCut):
    """One stage of a pipeline, on the device that has it."""

    def __init__(self, split: values.Stages, peers: Peers) -> None:
        super().__init__(peers)
        self._split = split
        self._stage, self._last = peers.rank, peers.count - 1
        self._first: list[str] = []  # the operators of the graph that was measured
        self._places: list[int] = []
        self._random: list[int] = []
        self._drawing: set[str] = set()  # operators that draw random numbers
        self._stage_of: dict[str, int] = {}  # by parameter or buffer, the first stage that uses it
        self._changed: set[str] = set()  # buffers that training changes

    @property
    def speaks(self) -> bool:
        return self._stage == self._last

    # ── who does what ────────────────────────────────────────────────────────────────────────────────────

    def sized(self, given: Any) -> Any:
        """Returns as much as a micro-batch."""
        length = length_of(given)
        size = -(-length // self._split.micro_batches)
        return part_of(given, length, 0, size) if 0 < size < length else given

    def decide(self, call: CallGraph, values: list[torch.Tensor]) -> None:
        self._first = [str(node.target) for node in call.nodes]
        names = self._split.cut_at
        named = divide.at_modules(self.model, call, names)  # on every device: what is wrong is said at once
        buffers = [name for name, _ in self.model.named_buffers()]
        decision = None
        if self.peers.first:  # replicas have to be cut alike: those that have the same layer share its statistics
            measured = measure(self.model, call, values)
            divide.check(measured, named, names)
            places = named or divide.by_cost(call, measured, self._split.stages)
            decision = [places, measured.random, [buffers.index(name) for name in measured.changed]]
        self._places, self._random, changed = (
            self.peers.tell_all(decision[number] if decision is not None else None) for number in range(3)
        )
        self._changed = {buffers[number] for number in changed}
        self._drawing = {str(call.nodes[number].target) for number in self._random}
        of_node = {node: sum(place <= number for place in self._places) for number, node in enumerate(call.nodes)}
        for name, node in call.tensors.items():
            self._stage_of[name] = min((of_node[user] for user in node.users if user in of_node), default=0)

    def open(self, call: CallGraph) -> _Stage:
        if [str(node.target) for node in call.nodes] == self._first:
            places, random = self._places, self._random
        else:
            places = divide.follow(call, self._stage_of, self._split.stages)
            random = [number for number, node in enumerate(call.nodes) if str(node.target) in self._drawing]
            self._check_buffers(call, places)
        part = StagePart(call, places, self._stage, random, statistics_of(self.model))
        return _Stage(self, part)

    def _check_buffers(self, call: CallGraph, places: Sequence[int]) -> None:
        for number, names in enumerate(buffers_used(call, list(self._changed))):
            for name in names:
                if sum(place <= number for place in places) != self._stage_of.get(name, 0):
                    raise ModelError(
                        "model",
                        type(self.model).__name__,
                        f"called like this it would need buffer {name} on another stage than at first, "
                        "cut it elsewhere with --cut-at",
                    )

    def part_of(self, name: str) -> TensorPart:
        if name in dict(self.model.named_buffers()):
            return WHOLE if self._stage_of.get(name, 0) == self._stage else SAME
        return WHOLE  # no two stages find the same: what this one finds is a summand, and mostly nothing

    # ── forward ──────────────────────────────────────────────────────────────────────────────────────────

    def forward(self, part: StagePart, inputs: list[torch.Tensor], flight: _Flight | None) -> dict[fx.Node, Any]:
        """Runs this stage, from what the stages before send to what those behind need. Returns all values."""
        found: dict[fx.Node, Any] = dict(zip(part.call.inputs, inputs, strict=True))
        for source, nodes in part.takes.items():
            if nodes:
                arrived, leaves = receive(self.peers, source)
                found.update(zip(nodes, arrived, strict=True))
                if flight is not None:
                    flight.taken[source] = leaves
        part.run(found, self.tensors, None if flight is None else flight.seed)
        for target, nodes in part.gives.items():
            if nodes:
                sent = self._send([found[node] for node in nodes], target)
                if flight is not None:
                    flight.given[target] = [get_gradient_edge(tensor) for tensor in sent if tensor.requires_grad]
        return found

    def everything_returned(self, part: StagePart, inputs: list[torch.Tensor]) -> list[Any]:
        """Runs all stages one after another. Returns what the graph returns, on every device."""
        found = self.forward(part, inputs, None)
        if self.speaks:
            returned = [found[node] for node in part.returned]
            for other in range(self._last):
                self._send(returned, other)
            return returned
        return list(receive(self.peers, self._last)[0])

    def _send(self, values: list[Any], to: int) -> list[torch.Tensor]:
        """Sends values to another stage. Returns the tensors among them."""
        packed = pack(values)
        send(self.peers, packed, to)
        return packed[1]

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────

    def train(self, loss: Loss, model: nn.Module, batch: Any, weight: Weight, check: Check) -> LossPart:
        pieces = micro_batches(batch, self._split.micro_batches)
        if len(pieces) < self._split.micro_batches:
            self._check_statistics(model, len(pieces))
        # The same on all devices of the replica, now and, after having drawn different things, at the end.
        seed = int(torch.randint(2**62, ()))
        flights: dict[int, _Flight] = {}
        total = NOTHING
        for what, number in order(self._split.schedule, self._stage, self._last + 1, len(pieces)):
            if what == FORWARD:
                piece, share = pieces[number]
                flights[number] = _Flight(mixed(seed, number), weight.part(share))
                total = total + self._forward_one(loss, piece, flights[number], check)
            else:
                self._backward_one(flights.pop(number))
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

    def _forward_one(self, loss: Loss, piece: Any, flight: _Flight, check: Check) -> LossPart:
        """Runs a micro-batch forward. Returns its share of the loss, on the last stage."""
        kind, inputs = self.kind_of(loss, piece)
        self.look(kind, piece)
        torch.default_generator.manual_seed(flight.seed)
        assert isinstance(kind.compute, _Stage)
        part = kind.compute.part
        values = self.forward(part, inputs, flight)
        if not self.speaks:
            return NOTHING
        found = check(part.call.structure.fill([values[node] for node in part.returned]))
        flight.loss = found.weighted(flight.weight)
        return found.part(flight.weight)

    def _backward_one(self, flight: _Flight) -> None:
        """Runs a micro-batch backward, and sends gradients to the stages before."""
        if flight.loss is not None:
            flight.loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._backward_of_others(flight)
        for source, leaves in flight.taken.items():
            if leaves:
                self._send([leaf.grad for leaf in leaves], source)

    def _backward_of_others(self, flight: _Flight) -> None:
        """Goes back from the gradients of what was sent; those of a value that several stages use add up."""
        arrived = [
            (edge, gradient)
            for target, sent in sorted(flight.given.items())
            if sent
            for edge, gradient in zip(sent, receive(self.peers, target)[0], strict=True)
            if gradient is not None
        ]
        if arrived:
            edges, gradients = zip(*arrived, strict=True)
            torch.autograd.backward(edges, gradients)


@dataclass
class _Stage:
    """This device's stage of one graph, to be called outside of training."""

    cut: StagesCut
    part: StagePart

    def __call__(self, inputs: list[torch.Tensor]) -> list[Any]:
        return self.cut.everything_returned(self.part, inputs)
