"""A model cut by layer: its forward on one device is that device's stage.

In training the user's loss is called on every device, for every micro-batch. On all but the last, the model's forward
sends on what it has computed and ends the loss there; on the last it returns what the model returns, and the loss is
real. Backward goes the other way: a stage gets gradients of what it has sent, and sends those of what it has got.

Whatever a stage finds for a parameter is a summand of the parameter's gradient, so weights that are used by several
stages, or by the loss itself, need nothing special.

Outside of training, the stages run one after another and every device gets the whole output.
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
from paceline.exchange.packing import CannotTravel, pack, receive, send
from paceline.loss_value import NOTHING, LossPart, Weight
from paceline.optim.models import in_mode
from paceline.seeds import mixed
from paceline.split import values
from paceline.split.cut import SAME, WHOLE, Check, Cut, Example, Loss, TensorPart
from paceline.split.stages import divide
from paceline.split.stages.measure import Measured, buffers_used, measure
from paceline.split.stages.micro_batches import length_of, micro_batches, part_of
from paceline.split.stages.schedule import FORWARD, order
from paceline.split.stages.stage_module import OperationSeeds, StageModule
from paceline.split.trace import Traced, tensors, trace
from paceline.torch_private import TreeSpec, is_compiled, tree_flatten, tree_unflatten

MOST_WAYS = 64  # to call the model that are kept in mind


class _Passed(BaseException):
    """Ends a loss on a stage that is not the last. No user's `except Exception` catches it."""


@dataclass
class _Flight:
    """A micro-batch between its forward and its backward."""

    seed: int
    weight: Weight
    called: bool = False
    taken: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # by stage: got from it, may get a gradient
    given: dict[int, list[GradientEdge]] = field(default_factory=dict)  # by stage: whose gradients it will send
    loss: torch.Tensor | None = None


class StagesCut(Cut):
    """One stage of a pipeline, on the device that has it."""

    def __init__(self, split: values.Stages, peers: Peers) -> None:
        super().__init__(peers)
        self._split = split
        self._stage, self._last = peers.rank, peers.count - 1
        self._parts: list[StageModule] = []  # by way to call the model; the first is the one that was measured
        self._places: list[int] = []
        self._random: list[int] = []
        self._buffers: list[str] = []
        self._owners: dict[str, int] = {}  # by buffer, the stage that has it
        self._changed: dict[str, int] = {}  # the same for those that training changes
        self._flight: _Flight | None = None

    @property
    def speaks(self) -> bool:
        return self._stage == self._last

    # ── who does what ────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, model: nn.Module, example: Example) -> None:
        if is_compiled(model):
            raise ModelError(
                "model", type(model).__name__, "a compiled model cannot be cut by layer, leave out torch.compile"
            )
        self._model, self._forward = model, model.forward
        with in_mode(model, training=True), torch.enable_grad():
            self._decide(model, *tree_flatten(example))
        model.forward = self._part_forward

    def _decide(self, model: nn.Module, leaves: list[Any], spec: TreeSpec) -> None:
        """Decides where the model is cut, as the first device of all says, and builds this device's stage."""
        traced = trace(model, self._forward, leaves, spec, grad=True)
        names = self._split.cut_at
        named = divide.at_modules(model, traced, names)  # on every device: what is wrong is said at once
        buffers = self._buffers = [name for name, _ in model.named_buffers()]
        decision = None
        if self.peers.first:  # replicas have to be cut alike: those that have the same layer share its statistics
            measured = self._measure(model, traced, leaves, spec)
            divide.check(measured, named, names)
            places = named or divide.by_cost(traced, measured, self._split.stages)
            decision = [places, measured.random, [buffers.index(name) for name in measured.changed]]
        self._places, self._random, changed = (
            self.peers.tell_all(decision[number] if decision is not None else None) for number in range(3)
        )
        used = buffers_used(model, traced)
        for number, names_here in enumerate(used):
            for name in names_here:
                self._owners.setdefault(name, self._stage_of(number, self._places))
        self._changed = {buffers[number]: self._owners.get(buffers[number], 0) for number in changed}
        self._parts = [StageModule(model, traced, self._places, self._stage, self._random)]

    def _measure(self, model: nn.Module, traced: Traced, leaves: list[Any], spec: TreeSpec) -> Measured:
        """Returns what operations cost, on as much as a micro-batch if it can be told which dim of the arguments is
        that of samples."""
        lengths = {leaf.size(0) for leaf in tensors(leaves) if leaf.dim()}
        if len(lengths) == 1:
            length = length_of(leaves)
            size = max(2, length // self._split.micro_batches)  # of one sample there are no statistics

            def sized(leaf: Any) -> Any:
                enough = torch.cat([leaf, leaf]) if length == 1 and leaf.dim() else leaf
                return part_of(enough, len(enough) if leaf.dim() else 0, 0, size)

            some = [sized(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            if traced.fits(model, some, spec):
                leaves = some

        def forward() -> Any:
            copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(copies, spec)
            return self._forward(*args, **kwargs)

        return measure(model, traced, tensors(leaves), forward)

    @staticmethod
    def _stage_of(number: int, places: Sequence[int]) -> int:
        return sum(place <= number for place in places)

    def _part(self, leaves: Sequence[Any], spec: TreeSpec) -> StageModule:
        """Returns this stage's part of what the model does when it is called like this."""
        for part in self._parts:
            if part.traced.fits(self._model, leaves, spec):
                return part
        traced = trace(self._model, self._forward, leaves, spec, grad=torch.is_grad_enabled())
        first = self._parts[0].traced
        places = divide.follow(traced, first, self._places)
        for number, names in enumerate(buffers_used(self._model, traced)):
            for name in names & self._changed.keys():
                if self._stage_of(number, places) != self._changed[name]:
                    raise ModelError(
                        "model",
                        type(self._model).__name__,
                        f"called like this it would need buffer {name} on another stage than at first, "
                        "cut it elsewhere with --cut-at",
                    )
        drawing = {(first.nodes[number].op, first.nodes[number].target) for number in self._random}
        random = [number for number, node in enumerate(traced.nodes) if (node.op, node.target) in drawing]
        if len(self._parts) == MOST_WAYS:
            del self._parts[1]
        self._parts.append(StageModule(self._model, traced, places, self._stage, random))
        return self._parts[-1]

    def part_of(self, name: str) -> TensorPart:
        if name in self._buffers:
            return WHOLE if self._owners.get(name, 0) == self._stage else SAME
        return WHOLE  # no two stages find the same: what this one finds is a summand, and mostly nothing

    # ── forward ──────────────────────────────────────────────────────────────────────────────────────────

    def _part_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of the model's forward: this stage's part of a micro-batch, or all stages one after
        another."""
        leaves, spec = tree_flatten((args, kwargs))
        flight = self._flight
        if flight is None:
            with torch.no_grad():
                return self._whole_forward(self._part(leaves, spec), leaves)
        if flight.called:
            raise ModelError(
                "loss", "one that calls the model twice", "with --stages it may call the model once a batch"
            )
        flight.called = True
        part = self._part(leaves, spec)
        found = self._take(part, leaves, flight)
        part.run(found, OperationSeeds(flight.seed))
        for target, nodes in part.gives.items():
            if nodes:
                sent = self._send([found[node] for node in nodes], target)
                flight.given[target] = [get_gradient_edge(tensor) for tensor in sent if tensor.requires_grad]
        if not self.speaks:
            raise _Passed
        torch.default_generator.manual_seed(mixed(flight.seed, -1))  # whatever was drawn in the model's last stage
        return part.output(found, self._model)

    def _take(self, part: StageModule, leaves: Sequence[Any], flight: _Flight | None) -> dict[fx.Node, Any]:
        """Returns the values that this stage begins with: inputs of the model, and what other stages send."""
        found: dict[fx.Node, Any] = dict(zip(part.traced.inputs, tensors(leaves), strict=True))
        for source, nodes in part.takes.items():
            if nodes:
                arrived, leaves_of_graph = receive(self.peers, source)
                found.update(zip(nodes, arrived, strict=True))
                if flight is not None:
                    flight.taken[source] = leaves_of_graph
        return found

    def _whole_forward(self, part: StageModule, leaves: Sequence[Any]) -> Any:
        found = self._take(part, leaves, None)
        part.run(found, OperationSeeds(None))
        for target, nodes in part.gives.items():
            if nodes:
                self._send([found[node] for node in nodes], target)
        if self.speaks:
            for other in range(self._last):
                self._send([found[node] for node in part.returned], other)
        else:
            returned, _ = receive(self.peers, self._last)
            found.update(zip(part.returned, returned, strict=True))
        return part.output(found, self._model)

    def _send(self, values: list[Any], to: int) -> list[torch.Tensor]:
        """Sends values to another stage. Returns the tensors among them."""
        try:
            packed = pack(values)
        except CannotTravel as what:
            expected = "only tensors, numbers, texts and lists of them can go from one stage to another"
            raise ModelError("model", what, expected) from None
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
                total = total + self._forward_one(loss, model, piece, flights[number], check)
            else:
                self._backward_one(flights.pop(number))
        torch.default_generator.manual_seed(mixed(seed, -1))
        return total

    def _check_statistics(self, model: nn.Module, count: int) -> None:
        """Refuses fewer micro-batches than on other replicas, where they share statistics."""
        if any(getattr(getattr(module, "_statistics", None), "sum", None) for module in model.modules()):
            raise DataError(
                "batch size",
                f"{count} samples on a replica in the last batch",
                f"with BatchNorm every replica needs {self._split.micro_batches} samples, one a micro-batch; "
                "give fewer micro-batches, or drop_last=True",
            )

    def _forward_one(self, loss: Loss, model: nn.Module, piece: Any, flight: _Flight, check: Check) -> LossPart:
        """Runs a micro-batch forward. Returns its share of the loss, on the last stage."""
        torch.default_generator.manual_seed(flight.seed)
        self._flight = flight
        try:
            returned = loss(model, piece)
        except _Passed:
            return NOTHING
        finally:
            self._flight = None
        if not flight.called:
            raise ModelError("loss", "it never calls the model", "a cut model must be called as model(…) in the loss")
        found = check(returned)
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
