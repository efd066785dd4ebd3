"""The dims of everything in one graph of a computation: what each operator does with those of its operands.

Rules (`rules.py`) say that, one for each family of operators; this is what they read, and where it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from paceline.graph.call_graph import CallGraph
from paceline.graph.operators import changed_by, changed_groups, name_of
from paceline.split.layout.atoms import Atom, Dim, Dims


@dataclass
class Op:
    """What an operator does: the dims of its result, which of its operands' must be whole, which are added up."""

    out: Any  # Dims, or a tuple of Dims; None: no tensor
    whole: list[Dim] = field(default_factory=list)
    summed: list[Dim] = field(default_factory=list)
    late: frozenset[str] = frozenset()  # arguments that are added after the sum
    kind: str = ""  # of operators that are computed in another way when they are cut: those that `rewrite` knows
    has_rule: bool = True


class GraphDims:
    """The dims of everything in one graph. Parameters have theirs in common with other graphs of the same model."""

    def __init__(self, call: CallGraph, parameters: Mapping[str, Dims]) -> None:
        self.call = call
        self.parameters = parameters  # by name
        self.dims: dict[fx.Node, Any] = {}
        self.ops: dict[fx.Node, Op] = {}
        self.inputs: list[Dims] = []
        self.seen_as: list[tuple[Dim, str]] = []  # dims of parameters, and as what an operator has used them
        self.changing = changed_groups(call.nodes)
        self.written = _written(call, self.changing)

    def join(self, rules: Mapping[str, Rule]) -> None:
        """Goes through the graph, and lets the rule of every operator join the dims that are the same."""
        for name, node in self.call.tensors.items():
            self.dims[node] = self.parameters[name]
        for node in (*self.call.inputs, *self.call.constants):
            self.dims[node] = self.fresh(self.call.values[node])
        self.inputs = [self.dims[node] for node in self.call.inputs]
        for node in self.call.nodes:
            self.ops[node] = op = self._op(node, rules)
            self.dims[node] = op.out

    def _op(self, node: fx.Node, rules: Mapping[str, Rule]) -> Op:
        if not has_tensors(self.call.values[node]) and not any(changed_by(node)):
            return Op(None, whole=self._all_of(node))
        if node in self.changing or any(map(self._has_no_dims, (node, *node.all_input_nodes))):
            return self._alike(node)  # who changes a part of something, or a view of it, must have all of it
        rule = rules.get(name_of(node).removesuffix("_"))
        op = rule(self, node) if rule is not None else None
        return op if op is not None else self._alike(node)

    def _alike(self, node: fx.Node) -> Op:
        """Returns what an operator without a rule does: all operands are whole, and all devices compute the same."""
        return Op(self.fresh(self.call.values[node]), whole=self._all_of(node), has_rule=False)

    def _has_no_dims(self, node: fx.Node) -> bool:
        value = self.call.values[node]
        return isinstance(value, torch.Tensor) and self.fresh(value) is None

    def _all_of(self, node: fx.Node) -> list[Dim]:
        return [dim for operand in node.all_input_nodes for dim in flat_dims(self.dims[operand])]

    # ── for rules ────────────────────────────────────────────────────────────────────────────────────────

    def fresh(self, value: Any) -> Any:
        """Returns new dims for a value: one atom each; None if its shape follows from values, as that of `x[x > 0]`."""
        if isinstance(value, torch.Tensor):
            known = all(isinstance(size, int) for size in value.shape)
            return [[Atom(size)] for size in value.shape] if known else None
        if isinstance(value, (tuple, list)):
            return tuple(self.fresh(item) for item in value)
        return None

    def of(self, node: Any) -> Dims:
        """Returns the dims of what a node gives; none if that is no single tensor."""
        dims = self.dims.get(node) if isinstance(node, fx.Node) else None
        return dims if isinstance(dims, list) else []

    def value(self, node: Any) -> Any:
        """Returns what a node gives, as a tensor without values."""
        return self.call.values[node]

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Returns the shape of the tensor that a node gives."""
        return tuple(self.call.values[node].shape)

    def note(self, dims: Iterable[Dim], word: str) -> None:
        """Notes as what an operator uses these dims."""
        self.seen_as += [(dim, word) for dim in dims]


Rule = Callable[[GraphDims, fx.Node], Op | None]


def _written(call: CallGraph, changing: Mapping[fx.Node, fx.Node]) -> set[str]:
    """Returns the buffers that are changed in place. Who changes one must have all of it, and so must who sees that; a
    BatchNorm changes its own, channel by channel."""
    found = set()
    for node in call.nodes:
        if name_of(node) != "batch_norm":
            found |= {call.names.get(changing.get(operand, operand), "") for operand in changed_by(node)}
    return found - {""}


def has_tensors(value: Any) -> bool:
    """Returns whether a value is a tensor, or a list with one."""
    return isinstance(value, torch.Tensor) or (isinstance(value, (tuple, list)) and any(map(has_tensors, value)))


def flat_dims(dims: Any) -> list[Dim]:
    """Returns the dims of a value as one list, also of a tuple of tensors."""
    if isinstance(dims, tuple):
        return [dim for part in dims for dim in flat_dims(part)]
    return dims or []
