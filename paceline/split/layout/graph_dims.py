"""The dims of everything in one graph of a model: what each node does with those of its operands.

Rules (`rules.py`) say that, one for each kind of operator; this is what they read, and where it is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from paceline.split.layout.atoms import Atom, Dim, Dims


@dataclass
class Op:
    """What a node does: the dims of its result, of a module's parameters, and which must be whole or are added up."""

    out: Any  # Dims, or a tuple of Dims; None: no tensor
    whole: list[Dim] = field(default_factory=list)
    summed: list[Dim] = field(default_factory=list)
    parameters: dict[str, Dims] = field(default_factory=dict)  # by name inside the module
    late: frozenset[str] = frozenset()  # parameters that are added after the sum
    kind: str = ""  # of operators that are computed in another way when they are cut: those that `rewrite` knows


class GraphDims:
    """The dims of everything in one graph. Parameters have theirs in common with other graphs of the same model."""

    def __init__(self, model: nn.Module, graph: fx.Graph, values: dict[str, Any], parameters: dict[str, Dims]) -> None:
        self.model = model
        self.graph = graph
        self.values = values
        self.parameters = parameters  # by name
        self.dims: dict[fx.Node, Any] = {}
        self.ops: dict[fx.Node, Op] = {}
        self.inputs: list[Dims] = []

    def join(self, rule_of: Callable[[nn.Module, fx.Node], Rule | None]) -> None:
        """Goes through the graph, and lets the rule of every node join the dims that are the same."""
        for node in self.graph.nodes:
            self.ops[node] = op = self._op(node, rule_of)
            self.dims[node] = op.out

    def _op(self, node: fx.Node, rule_of: Callable[[nn.Module, fx.Node], Rule | None]) -> Op:
        value = self.values[node.name]
        if node.op == "placeholder":
            dims = self.fresh(value)
            self.inputs.append(dims)
            return Op(dims)
        if node.op == "get_attr":
            return Op(self.parameters.get(str(node.target)) or self.fresh(value))
        if node.op == "output" or not has_tensors(value):
            return Op(None)
        rule = rule_of(self.model, node)
        op = rule(self, node) if rule is not None else None
        return op if op is not None else self._alike(node)

    def _alike(self, node: fx.Node) -> Op:
        """Returns what an operator without a rule does: all operands are whole, and all devices compute the same."""
        whole = [dim for operand in node.all_input_nodes for dim in flat_dims(self.dims[operand])]
        op = Op(self.fresh(self.values[node.name]), whole=whole)
        if node.op == "call_module":
            prefix = str(node.target)
            for name, _ in self.model.get_submodule(prefix).named_parameters():
                if (dims := self.parameters.get(f"{prefix}.{name}")) is not None:
                    op.parameters[name] = dims
                    op.whole += dims
        return op

    def first_name(self, name: str) -> str:
        """Returns the first of a tied parameter's names, by which it goes."""
        dims = self.parameters[name]
        return next(first for first, own in self.parameters.items() if own is dims)

    # ── for rules ────────────────────────────────────────────────────────────────────────────────────────

    def fresh(self, value: Any) -> Any:
        """Returns new dims for a value: one atom each."""
        if isinstance(value, torch.Tensor):
            return [[Atom(size)] for size in value.shape]
        if isinstance(value, (tuple, list)):
            return tuple(self.fresh(item) for item in value)
        return None

    def of(self, node: Any) -> Dims:
        """Returns the dims of what a node gives; none if that is no single tensor."""
        dims = self.dims.get(node) if isinstance(node, fx.Node) else None
        return dims if isinstance(dims, list) else []

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """Returns the shape of the tensor that a node gives."""
        return tuple(self.values[node.name].shape)

    def module(self, node: fx.Node) -> nn.Module:
        """Returns the module that a node calls."""
        return self.model.get_submodule(str(node.target))

    def own(self, node: fx.Node, name: str) -> Dims | None:
        """Returns the dims of a parameter of the module that a node calls; None if it has no such parameter."""
        return self.parameters.get(f"{node.target}.{name}")


Rule = Callable[[GraphDims, fx.Node], Op | None]


def has_tensors(value: Any) -> bool:
    """Returns whether a value is a tensor, or a list with one."""
    return isinstance(value, torch.Tensor) or (isinstance(value, (tuple, list)) and any(map(has_tensors, value)))


def flat_dims(dims: Any) -> list[Dim]:
    """Returns the dims of a value as one list, also of a tuple of tensors."""
    if isinstance(dims, tuple):
        return [dim for part in dims for dim in flat_dims(part)]
    return dims or []
