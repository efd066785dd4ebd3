"""Whether a graph computes what the function computes: loss, gradients and buffers, on the same batch.

torch.export does not notice everything: a user's own `autograd.Function` loses its backward, a number that changes from
step to step becomes a constant. What is noticed here is refused; nothing of it is silent.

The same operators give the same (`noted_operators.py`), and nearly all graphs have those. Where they are not known to
be the same, both are computed, which takes as long as two steps of one process and the memory of two gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.errors import ModelError
from paceline.graph.call_graph import CallGraph
from paceline.graph.capture import CAPTURING, Function
from paceline.graph.drawn_numbers import DrawnNumbers
from paceline.graph.inputs import Structure, take_apart
from paceline.graph.noted_operators import CannotFollow, Known, NotedOperators, noted_operators
from paceline.optim.batchnorm import plain_batchnorm
from paceline.optim.models import own_state

# What a computation returned, the gradients, the buffers after it, and numbers that are returned beside tensors.
Found = tuple[list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor], list[str]]
CLOSE = 1e-5  # of a tensor's scale: both sides run the same kernels


class GraphProof:
    """Holds graphs against one computation: a function of a model and of what it is given."""

    def __init__(self, function: Function, model: nn.Module, given: Any) -> None:
        self.function, self.model, self.given = function, model, given
        self._gradients = torch.is_grad_enabled()
        self._known: Known = {}
        self._structure: Structure | None = None  # of what it returns
        self._theirs = self._noted(self._call)

    def _call(self, plain: nn.Module) -> list[torch.Tensor]:
        with DrawnNumbers():
            tensors, self._structure = take_apart(self.function(plain, self.given), "output")
        return tensors

    def _noted(self, compute: Callable[[nn.Module], Any]) -> NotedOperators | None:
        plain = own_state(self.model)
        inputs, _ = take_apart(self.given, "batch")
        with contextlib.suppress(CannotFollow), CAPTURING, plain_batchnorm(plain):
            return noted_operators(plain, inputs, lambda: compute(plain), self._known, gradients=self._gradients)
        return None

    @property
    def constants(self) -> list[torch.Tensor]:
        """Returns the tensors that are neither the model's nor given; see `NotedOperators`."""
        return self._theirs.constants if self._theirs is not None else []

    @property
    def content(self) -> str | None:
        """Returns all that a graph of this follows from, None if that is not known."""
        if self._theirs is None or self._structure is None:
            return None
        inputs, _ = take_apart(self.given, "batch")
        tensors = (*self.model.named_parameters(), *self.model.named_buffers(), *enumerate(inputs))
        shapes = [(name, tuple(t.shape), t.stride(), str(t.dtype), t.requires_grad) for name, t in tensors]
        modules = [(path, type(module).__qualname__) for path, module in self.model.named_modules()]
        returned = self._structure.words, self._structure.constants
        return repr((self._theirs.operators, shapes, modules, returned))

    def holds(self, graph: CallGraph) -> bool:
        """Returns whether a graph is known to compute the same: by its operators, without computing anything."""
        if self._theirs is None or self._structure is None or _numbers(self._structure) != _numbers(graph.structure):
            return False
        ours = self._noted(lambda plain: run_whole(graph, plain, self.given))
        return ours is not None and ours.operators == self._theirs.operators

    def prove(self, graph: CallGraph) -> None:
        """Raises a ModelError unless the graph gives what the function gives, and its gradients if they are on. Tensors
        are left as they were."""
        if not self.holds(graph):
            compare(self.function, self.model, self.given, graph, gradients=self._gradients)


def compare(
    function: Function, model: nn.Module, given: Any, graph: CallGraph, *, gradients: bool, twice: bool = True
) -> None:
    """Raises a ModelError if the graph gives another loss than the function, or other gradients. `twice`: or if the
    function gives something else when it is called again. The model, its gradients and the random numbers are left as
    they were."""
    model = own_state(model)
    with plain_batchnorm(model):
        _compare(function, model, given, graph, gradients=gradients, twice=twice)


def _compare(
    function: Function, model: nn.Module, given: Any, graph: CallGraph, *, gradients: bool, twice: bool
) -> None:
    kept = [parameter.grad for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    random = torch.get_rng_state()

    def run(compute: Callable[[], tuple[list[Any], Structure]]) -> Found:
        torch.set_rng_state(random)
        with torch.set_grad_enabled(gradients):
            leaves, structure = compute()
            returned = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            found: list[torch.Tensor | None] = [None] * len(kept)
            if gradients and returned and returned[0].requires_grad:
                wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
                of = dict(zip(wanted, torch.autograd.grad(returned[0].sum(), wanted, allow_unused=True), strict=True))
                found = [of.get(parameter) for parameter in model.parameters()]
        changed = [buffer.clone() for buffer in model.buffers()]
        for buffer, before in buffers:
            buffer.data.copy_(before)  # unnoticed by a backward that is yet to come
        return [tensor.detach() for tensor in returned], found, changed, _numbers(structure)

    try:
        theirs = run(lambda: take_apart(function(model, given), "output"))
        ours = run(lambda: (run_whole(graph, model, given), graph.structure))
        why = _difference(model, theirs, ours)
        # Of what counts its calls, the graph may be that of just the call it was compared with.
        again = run(lambda: take_apart(function(model, given), "output")) if twice or why is not None else theirs
    finally:
        torch.set_rng_state(random)
        for parameter, grad in zip(model.parameters(), kept, strict=True):
            parameter.grad = grad
    changes = _difference(model, theirs, again)
    if why is not None or changes is not None:
        raise ModelError(
            "loss",
            type(model).__name__,
            (
                f"followed operator by operator it gives another {why} than when it is called"
                if changes is None
                else f"it gives another {changes} when it is called again with the same batch, so it keeps something"
            )
            + "; a cut model cannot have a backward of its own (autograd.Function), state outside of "
            "parameters and buffers, or numbers that change: use --replicas",
        )


def run_whole(graph: CallGraph, model: nn.Module, given: Any) -> list[Any]:
    """Returns what the uncut graph gives."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    inputs, _ = take_apart(given, "batch")
    takes = [*graph.inputs, *graph.tensors.values(), *graph.constants]
    gives = [value for value in graph.returned if not isinstance(value, torch.Tensor)]
    values = [*inputs, *(named[name] for name in graph.tensors), *graph.constants.values()]
    return list(graph.runs(graph.nodes, takes, gives)(*values))


def _difference(model: nn.Module, one: Found, other: Found) -> str | None:
    """Returns what differs first between two computations, in words."""
    if len(one[0]) != len(other[0]) or not all(map(_close, one[0], other[0])):
        return "loss"
    if one[3] != other[3]:
        return f"number beside the loss ({', '.join(one[3])} and {', '.join(other[3])})"
    for (name, _), a, b in zip(model.named_parameters(), one[1], other[1], strict=True):
        if not _alike(a, b):
            return f"gradient of {name}"
    for (name, _), c, d in zip(model.named_buffers(), one[2], other[2], strict=True):
        if not _close(c, d):
            return f"buffer {name}"
    return None


def _numbers(structure: Structure) -> list[str]:
    """Returns the numbers in what is returned, which a graph has for good."""
    return [repr(value) for value in structure.constants if isinstance(value, (int, float, complex))]


def _alike(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Returns whether two gradients are the same; none at all is as good as zero."""
    one, other = (gradient.to_dense() if gradient is not None else None for gradient in (one, other))  # of a table
    if one is None or other is None:
        return (one is None or not bool(one.any())) and (other is None or not bool(other.any()))
    return _close(one, other)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if torch.equal(one, other):  # as they mostly are, and that is seen in a tenth of the time
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    scale = float(one.abs().nan_to_num().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=CLOSE, atol=CLOSE * scale + 1e-30, equal_nan=True)
