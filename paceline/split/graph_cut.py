"""Cuts that are made of the graph of what is computed: one graph for each kind of call, one part of it on each device.

A kind of call is a function (the loss, a metric), the modes its modules are in, whether there are gradients, and what
it is given but for the values of tensors. Its graph is captured when it comes up for the first time. The model itself
stays whole, and so whatever else a script computes with it is right, on whichever device.

The loss is held against its graph on the first batch, gradients and all, and its value on batches 2, 4, 8 … and on the
first of every other shape: numbers that change from step to step, and that a graph has for good, come to light there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.errors import ModelError
from paceline.exchange.mailboxes import Peers
from paceline.graph.call_graph import CallGraph
from paceline.graph.capture import Function, capture
from paceline.graph.inputs import Structure, take_apart
from paceline.graph.proof import compare
from paceline.loss_value import LossPart, Weight
from paceline.optim.models import own_state
from paceline.split.cut import Check, Cut, Loss
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
        return (self.modes, self.grad, self.tensors) == (other.modes, other.grad, other.tensors) and _same_function(
            self.function, other.function
        )


def _about(function: Function, model: nn.Module, tensors: list[torch.Tensor]) -> _About:
    shapes = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors)
    return _About(function, tuple(module.training for module in model.modules()), torch.is_grad_enabled(), shapes)


@dataclass
class _Kind:
    """One kind of call, its graph, and what this device computes of it."""

    about: _About
    structure: Structure  # of what it is given
    call: CallGraph
    compute: Compute
    times: int = 0
    proven: bool = False  # its gradients too, before the first step

    def fits(self, about: _About, structure: Structure) -> bool:
        return self.about.same_as(about) and self.structure.same_as(structure)


class GraphCut(Cut):
    """One device's side of a cut that is made of graphs."""

    def __init__(self, peers: Peers) -> None:
        super().__init__(peers)
        self._kinds: list[_Kind] = []
        self.model: nn.Module
        self.tensors: dict[str, torch.Tensor] = {}  # this device's parts of parameters and buffers, by name

    def decide(self, call: CallGraph, values: list[torch.Tensor]) -> None:
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
        call = capture(function, self.model, given)
        compare(function, self.model, given, call, gradients=torch.is_grad_enabled())
        tensors, structure = take_apart(given, "batch")
        self.decide(call, tensors)
        self._keep(call, _about(function, self.model, tensors), structure).proven = True

    def sized(self, given: Any) -> Any:
        """Returns as much of a batch as is computed at once."""
        return given

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def kind_of(self, function: Function, given: Any) -> tuple[_Kind, list[torch.Tensor]]:
        """Returns the kind of a call, with its graph, and the tensors that it is given."""
        tensors, structure = take_apart(given, "batch")
        about = _about(function, self.model, tensors)
        found = next((kind for kind in self._kinds if kind.fits(about, structure)), None)
        if found is None:
            found = self._keep(capture(function, self.model, given), about, structure)
        return found, tensors

    def _keep(self, call: CallGraph, about: _About, structure: Structure) -> _Kind:
        if len(self._kinds) == MOST_KINDS:
            del self._kinds[0]
        self._kinds.append(_Kind(about, structure, call, self.open(call)))
        return self._kinds[-1]

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────────

    def train(self, loss: Loss, model: nn.Module, batch: Any, weight: Weight, check: Check) -> LossPart:
        self.follow_frozen()
        kind, tensors = self.kind_of(loss, batch)
        self.look(kind, batch)
        found = check(kind.call.structure.fill(kind.compute(tensors)))
        found.backward(weight)
        return found.part(weight)

    def follow_frozen(self) -> None:
        """Has parts want gradients as the parameters do."""
        for name, parameter in self.model.named_parameters():
            part = self.tensors[name]
            if part is not parameter and part.requires_grad != parameter.requires_grad:
                part.requires_grad_(parameter.requires_grad)

    def look(self, kind: _Kind, batch: Any) -> None:
        """Holds the loss against its graph, now and then."""
        kind.times += 1
        if kind.times & (kind.times - 1) == 0 and not (kind.times == 1 and kind.proven):
            compare(kind.about.function, self.model, batch, kind.call, gradients=False)

    def call(self, function: Function, model: nn.Module, given: Any) -> Any:
        try:
            kind, tensors = self.kind_of(function, given)
        except ModelError:
            return function(model, given)  # the model is whole
        return kind.call.structure.fill(kind.compute(tensors))


def _same_function(one: Function, other: Function) -> bool:
    """Returns whether two functions compute the same: they are the same, or made by the same line from the same."""
    if one is other:
        return True
    code, others = getattr(one, "__code__", None), getattr(other, "__code__", None)
    if code is None or code is not others:
        return False

    def kept(function: Any) -> list[Any]:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]

    return all(a is b for a, b in zip(kept(one), kept(other), strict=True))
