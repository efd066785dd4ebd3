"""One computation in many shapes: a smaller last batch, sentences of another length every time.

The first shape is captured as it is. When a second one comes, the sizes that differ are left open and the computation
is captured once more: every other shape is that graph with numbers in their places. Where the code decides by a size
(1 is a size that torch decides by), the graph holds for some and another one is captured for others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from paceline.errors import ModelError
from paceline.graph.call_graph import CallGraph
from paceline.graph.capture import Function, capture
from paceline.graph.inputs import take_apart
from paceline.torch_private import conditions_of, expression_of, tree_map

Shapes = tuple[tuple[int, ...], ...]
MOST_OPEN = 8


class AllShapes:
    """The graphs of calls that differ in the sizes of tensors only."""

    def __init__(self) -> None:
        self._first: Shapes | None = None
        self._free: list[set[int]] = []  # by tensor, the dims in which shapes have differed so far
        self._can_open = True
        self._open: list[CallGraph] = []  # graphs with open sizes; more than one if the code decides by sizes

    def see(self, given: Any) -> None:
        """Takes notice of the shapes in what a function is given."""
        shapes = shapes_of(given)
        first = self._first = self._first or shapes
        new = [
            {dim for dim, sizes in enumerate(zip(*pair, strict=True)) if len({*sizes}) > 1}
            for pair in zip(first, shapes, strict=True)
        ]
        self._free = [one | other for one, other in zip(self._free or new, new, strict=True)]

    def graph(self, function: Function, model: nn.Module, given: Any) -> CallGraph:
        """Returns the graph of `function(model, given)`, whose shapes have been seen."""
        shapes = shapes_of(given)
        known = (with_sizes(call, shapes) for call in self._open)
        if (found := next(filter(None, known), None)) is not None:
            return found
        if any(self._free) and self._can_open and len(self._open) < MOST_OPEN:
            with contextlib.suppress(ModelError):
                found = with_sizes(opened := capture(function, model, given, self._free), shapes)
                if found is not None:
                    self._open.append(opened)
                    return found
            self._can_open = False
        return capture(function, model, given)


def shapes_of(given: Any) -> Shapes:
    """Returns the shapes of the tensors in what a function is given."""
    return tuple(tuple(tensor.shape) for tensor in take_apart(given, "batch")[0])


class FollowsFromValues(Exception):
    """A size that no shape of an input says."""


class OpenSizes:
    """What the open sizes of a graph are for some shapes of its inputs."""

    def __init__(self, inputs: Sequence[torch.Tensor], shapes: Shapes) -> None:
        self._numbers: dict[Any, int] = {}  # by expression
        sizes: list[tuple[Any, int]] = []
        for tensor, shape in zip(inputs, shapes, strict=True):
            sizes += zip(tensor.shape, shape, strict=True)
        opened = [(size, number) for size, number in sizes if self.is_open(size)]
        for size, number in opened:
            if expression_of(size).is_Symbol:
                self._numbers.setdefault(expression_of(size), number)
        self._symbols = dict(self._numbers)
        conditions = dict.fromkeys(condition for size, _ in opened for condition in conditions_of(size))
        # Whether the graph is right for these.
        self.hold = all(self.number(size) == number for size, number in sizes) and all(
            condition.subs(self._symbols) == True  # noqa: E712
            for condition in conditions
        )

    @staticmethod
    def is_open(value: Any) -> bool:
        return isinstance(value, torch.SymInt)

    def number(self, size: Any) -> int:
        """Returns an open size as a number."""
        if not self.is_open(size):
            return int(size)
        expression = expression_of(size)
        if expression not in self._numbers:
            if not expression.free_symbols <= self._symbols.keys():
                raise FollowsFromValues(str(expression))
            self._numbers[expression] = int(expression.subs(self._symbols))
        return int(self._numbers[expression])

    def numbers(self, value: Any) -> Any:
        """Returns a value without open sizes."""
        return tree_map(self._closed, value)

    def _closed(self, leaf: Any) -> Any:
        if self.is_open(leaf):
            return self.number(leaf)
        if isinstance(leaf, torch.Tensor) and any(map(self.is_open, leaf.shape)):
            shape, strides = list(map(self.number, leaf.shape)), list(map(self.number, leaf.stride()))
            return torch.empty_strided(shape, strides, dtype=leaf.dtype, device="meta")
        return leaf


def with_sizes(call: CallGraph, shapes: Shapes) -> CallGraph | None:
    """Returns a graph with open sizes for these shapes of its inputs; None if it does not hold for them."""
    try:
        sizes = OpenSizes([call.values[node] for node in call.inputs], shapes)
        return _filled(call, sizes) if sizes.hold else None
    except FollowsFromValues:
        return None


def _filled(call: CallGraph, sizes: OpenSizes) -> CallGraph:
    """Returns a graph with a number in the place of every open size."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    values: dict[fx.Node, Any] = {}
    for node in call.graph.nodes:
        value = call.values.get(node)
        if node.op == "output":
            continue
        if sizes.is_open(value):  # a size that was worked out
            copies[node] = sizes.number(value)
            continue
        args, kwargs = (sizes.numbers(fx.map_arg(given, copies.__getitem__)) for given in (node.args, node.kwargs))
        copies[node] = made = graph.create_node(node.op, node.target, args, kwargs, node.name)
        made.meta = dict(node.meta)
        values[made] = sizes.numbers(value)
    returned = [fx.map_arg(value, copies.__getitem__) for value in call.returned]
    graph.output(tuple(returned))
    return CallGraph(
        graph,
        [copies[node] for node in call.inputs],
        {name: copies[node] for name, node in call.tensors.items()},
        {copies[node]: tensor for node, tensor in call.constants.items()},
        returned,
        call.structure,
        values,
    )
