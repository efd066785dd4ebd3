"""Cuts that are made of the graph of what is computed: one graph for each kind of call, one part of it on each device.

A kind of call is a function (the loss, a metric), the modes its modules are in, whether there are gradients, and what
it is given but for the values of tensors. Its graph is captured when it comes up for the first time. The model itself
stays whole, and so whatever else a script computes with it is right, on whichever device.

Every kind is held against its graph when it comes up, the loss with its gradients. A graph has numbers for good that a
script may change: when one of those that can be seen does (`graph/python_effects.py`), and on batches 2, 4, 8 … of a
training, values are compared. A loss that is another one then is refused, and any other call computed without a graph.
A graph that an earlier run has kept is proven like a new one before it is used (`graph/kept.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from paceline.errors import LossError, ModelError
from paceline.exchange.mailboxes import Peers
from paceline.graph.call_graph import CallGraph
from paceline.graph.capture import Function
from paceline.graph.inputs import Structure, take_apart
from paceline.graph.kept import KeptGraph
from paceline.graph.operators import changed_by, changed_groups, name_of
from paceline.graph.proof import GraphProof, compare
from paceline.graph.python_effects import numbers_used, python_effects
from paceline.graph.shapes import AllShapes
from paceline.loss_value import LossPart, Weight
from paceline.optim.models import own_state
from paceline.split.cut import Check, Cut, Loss
from paceline.split.first_captures import FirstCaptures
from paceline.torch_private import inside_compiled

MOST_KINDS = 64  # of calls whose graphs are kept
Compute = Callable[[list[torch.Tensor]], list[Any]]


@dataclass(frozen=True)
class _About:
    """What tells one kind of call from another, but for what it is given beside tensors."""

    function: Function
    modes: tuple[bool, ...]  # of all modules
    grad: bool
    tensors: tuple[tuple[torch.Size, torch.dtype, bool], ...]

    def same_as(self, other: _About) -> bool:
        return self.tensors == other.tensors and self.same_but_for_sizes(other)

    def same_but_for_sizes(self, other: _About) -> bool:
        mine, others = ([(len(shape), *kind) for shape, *kind in about.tensors] for about in (self, other))
        same = (self.modes, self.grad, mine) == (other.modes, other.grad, others)
        return same and _same_function(self.function, other.function)


def _about(function: Function, model: nn.Module, tensors: list[torch.Tensor]) -> _About:
    shapes = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors)
    return _About(function, tuple(module.training for module in model.modules()), torch.is_grad_enabled(), shapes)


@dataclass
class _Kind:
    """One kind of call, its graph, and what this device computes of it."""

    about: _About
    structure: Structure  # of what it is given
    kept: KeptGraph
    compute: Compute
    shapes: AllShapes  # its graph is one of
    times: int = 0  # it came up
    last: int = 0  # the pass of the cut in which it did
    numbers: dict[Any, Any] = field(default_factory=dict)  # that can be seen, when it was held against that last
    aside: set[Any] = field(default_factory=set)  # of those, the ones that have changed and made no difference
    wrong: ModelError | None = None  # what was found when it was held against it

    @property
    def call(self) -> CallGraph:
        return self.kept.graph

    def fits(self, about: _About, structure: Structure) -> bool:
        return self.about.same_as(about) and self.structure.same_as(structure)

    def is_like(self, about: _About, structure: Structure) -> bool:
        """Returns whether it is that kind of call but for the sizes of tensors."""
        return self.about.same_but_for_sizes(about) and self.structure.same_as(structure)


class GraphCut(Cut):
    """One device's side of a cut that is made of graphs."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(peers)
        self._kinds: list[_Kind] = []
        self.model: nn.Module
        self.passes = 0  # of training, and other calls
        self.tensors: dict[str, torch.Tensor] = {}  # this device's parts of parameters and buffers, by name
        self._pieces: list[tuple[nn.Parameter, torch.Tensor]] = []  # parameters that it has no more than a part of

    def decide(self, kept: KeptGraph, values: list[torch.Tensor]) -> None:
        """Decides who does what, by the graph of what is computed first, and what it is given."""
        raise NotImplementedError

    def open(self, call: CallGraph) -> Compute:
        """Returns what this device computes of a graph: from the tensors it is given to those that it returns."""
        raise NotImplementedError

    # ── graphs ───────────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, function: Function, model: nn.Module, given: Any) -> None:
        if inside_compiled(model) is not None:
            raise ModelError("model", "compiled", "a model is cut first and compiled never, leave out torch.compile")
        self.model = own_state(model)
        given = self.sized(given)
        shapes = AllShapes()
        with python_effects(self.model) as effects:
            proof = GraphProof(function, self.model, given)  # on all devices at the same time
            with FirstCaptures(self.peers) as first:
                kept = KeptGraph(proof, shapes, first.begin, first.proven)
                self._check_loss(kept.graph)
                kept.prove()
                self._keep(kept)
                first.proven = kept.entry
        if effects and self.peers.first:
            warnings.warn(f"cut model: {'; '.join(effects)}: once a graph, not in every step", stacklevel=2)
        tensors, structure = take_apart(given, "batch")
        self.decide(kept, tensors)
        self._open(kept, _about(function, self.model, tensors), structure, shapes)

    def _check_loss(self, call: CallGraph) -> None:
        parameters, groups = dict(self.model.named_parameters()), changed_groups(call.nodes)
        for node in call.nodes:
            for operand in changed_by(node):
                name = call.names.get(groups.get(operand, operand), "")
                # Of another type it is a copy.
                if name in parameters and call.values[operand].dtype == parameters[name].dtype:
                    raise ModelError(
                        "model",
                        type(self.model).__name__,
                        f"{name_of(node)} changes its parameter {name} in place while the loss is computed, which "
                        "every device would do, and in every micro-batch; do that between steps",
                    )
        if not call.tensors or not any(isinstance(value, fx.Node) for value in call.returned):
            expected = "return a scalar tensor, or (sum, count), that is computed with the model"
            raise LossError("loss", "nothing that follows from the model", expected)

    def sized(self, given: Any) -> Any:
        """Returns as much of a batch as is computed at once."""
        return given

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        named = self.model.named_parameters()
        self._pieces = [(whole, tensors[name]) for name, whole in named if tensors[name] is not whole]

    def kind_of(self, function: Function, given: Any) -> tuple[_Kind, list[torch.Tensor]]:
        """Returns the kind of a call, with its graph, and the tensors that it is given."""
        tensors, structure = take_apart(given, "batch")
        about = _about(function, self.model, tensors)
        found = next((kind for kind in self._kinds if kind.fits(about, structure)), None)
        if found is None:
            shapes = next((kind.shapes for kind in self._kinds if kind.is_like(about, structure)), AllShapes())
            found = self._open(KeptGraph(GraphProof(function, self.model, given), shapes), about, structure, shapes)
        return found, tensors

    def _open(self, kept: KeptGraph, about: _About, structure: Structure, shapes: AllShapes) -> _Kind:
        if len(self._kinds) == MOST_KINDS:
            del self._kinds[0]
        self._kinds.append(_Kind(about, structure, kept, self.open(kept.graph), shapes))
        return self._kinds[-1]

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────────

    def train(self, loss: Loss, model: nn.Module, batch: Any, weight: Weight, check: Check) -> LossPart:
        self.passes += 1
        self.follow_frozen()
        kind, tensors = self.kind_of(loss, batch)
        self.look(kind, batch)
        found = check(kind.call.structure.fill(kind.compute(tensors)))
        found.backward(weight)
        return found.part(weight)

    def follow_frozen(self) -> None:
        """Has parts want gradients as the parameters do."""
        for parameter, part in self._pieces:
            if part.requires_grad != parameter.requires_grad:
                part.requires_grad_(parameter.requires_grad)

    def look(self, kind: _Kind, given: Any, *, trains: bool = True) -> None:
        """Holds a function against its graph, now and then; of a pass that consists of several, for one of them. Raises
        a ModelError if the graph is of something else."""
        if kind.wrong is not None:
            raise kind.wrong
        if kind.last == self.passes:
            return
        kind.times, kind.last = kind.times + 1, self.passes
        function = kind.about.function
        numbers = numbers_used(function, self.model)
        changed = {name for name, value in numbers.items() if kind.numbers.get(name, value) != value} - kind.aside
        try:
            if not kind.kept.is_proven:
                kind.kept.prove()
                self._keep(kind.kept)
            elif changed or (trains and kind.times > 1 and not kind.times & (kind.times - 1)):
                compare(function, self.model, given, kind.call, gradients=False, twice=False)
            elif kind.numbers:
                return
        except ModelError as error:
            kind.wrong = error
            raise
        kind.aside |= changed
        kind.numbers = numbers_used(function, self.model)  # it may count itself

    def _keep(self, kept: KeptGraph) -> None:
        """Keeps a graph that was held against what it was captured from."""
        if self.peers.first_here:
            kept.keep()

    def call(self, function: Function, model: nn.Module, given: Any) -> Any:
        self.passes += 1
        try:
            kind, tensors = self.kind_of(function, given)
            self.look(kind, given, trains=False)
        except ModelError:
            return function(model, given)  # the model is whole
        return kind.call.structure.fill(kind.compute(tensors))


def _same_function(one: Function, other: Function) -> bool:
    """Returns whether two functions compute the same: they are the same, or made by the same line from the same."""
    if one is other:
        return True
    code, others = getattr(one, "__code__", None), getattr(other, "__code__", None)
    if code is None or code is not others or getattr(one, "__self__", None) is not getattr(other, "__self__", None):
        return False

    def kept(function: Any) -> list[Any]:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]

    return all(a is b for a, b in zip(kept(one), kept(other), strict=True))
