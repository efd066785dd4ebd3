"""From the dims of a graph, and a layout, to a graph that one device runs on its parts.

Every operator works along the axes that any of its operands lie along. Then:

    an operand that has a dim that is cut elsewhere, and is whole    its part is taken        (`take_part`)
    a dim that the operator needs whole                              is put together before   (`put_together`)
    an operand that does not lie along an axis the operator works on its gradient is summed   (`copied`)
    a dim the operator adds up over                                  the result is summed     (`reduced`)

That is all there is to it, for any number of axes. Where an operator lies along no axis nothing is added, and every
device computes it alike. A parameter's gradient is not summed here: its owner adds up what devices have found
(`Usage`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from paceline.errors import ModelError
from paceline.exchange.mailboxes import DeviceGroup
from paceline.graph.call_graph import AROUND, CallGraph
from paceline.graph.operators import given, name_of
from paceline.optim.batchnorm import batch_norm
from paceline.split.collectives import copied, reduced
from paceline.split.layout import on_parts
from paceline.split.layout.atoms import Atom, Dim, leaves, repeated, size
from paceline.split.layout.axes import Axes, Cuts, Usage
from paceline.split.layout.graph_dims import GraphDims, Op, flat_dims

Call = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class _Plan:
    """How an operator is computed on parts."""

    needed: set[Atom]  # that must be whole
    target: Cuts  # atoms that are in parts, with their axes
    over: list[str]  # the axes along which results are summands
    late: set[fx.Node]  # operands that are added after the sum

    def working(self, operand: fx.Node) -> set[str]:
        """Returns the axes along which an operand is worked on."""
        return set(self.target.values()) - (set(self.over) if operand in self.late else set())


class GraphRewriter:
    """Makes, of a graph of which the dims are known, the one of this device."""

    def __init__(self, dims: GraphDims, axes: Axes, usage: Usage, written: Collection[str], *, decides: bool) -> None:
        """`written`: buffers that are whole on every device, whatever dims they have. `decides`: this is the graph by
        which `usage` is found out; otherwise that is what holds."""
        self._dims, self._axes, self._usage = dims, axes, usage
        self._names = dims.call.names
        self._cut: dict[fx.Node, Cuts] = {}  # of nodes of the old graph
        self._plans: dict[fx.Node, _Plan] = {}
        self.whole: dict[str, int] = {}  # operators that had parts put together for want of a rule: elements
        call = dims.call
        for node in (*call.inputs, *call.tensors.values(), *call.constants):
            self._cut[node] = axes.cuts(dims.dims[node]) if self._names.get(node, "") not in ("", *written) else {}
        for node in call.nodes:
            self._plan(node, dims.ops[node], decides=decides)

    def _plan(self, node: fx.Node, op: Op, *, decides: bool) -> None:
        """Finds out along which axes an operator works, and so its result lies."""
        needed, target = self._works_along(node, op, node.all_input_nodes)
        summed = {leaf for dim in op.summed for leaf in leaves(dim)}
        over = [target[atom] for atom in target if atom in summed]
        late = {given(node)[name] for name in op.late if isinstance(given(node).get(name), fx.Node)}
        plan = self._plans[node] = _Plan(needed, target, over, late)
        for operand in node.all_input_nodes if decides else ():
            if operand in self._names and isinstance(self._dims.dims[operand], list):
                own = set(self._cut[operand].values())
                self._usage.note(self._names[operand], plan.working(operand) - own)
        out_atoms = {leaf for dim in flat_dims(op.out) for leaf in leaves(dim)}
        self._cut[node] = {atom: axis for atom, axis in target.items() if atom in out_atoms}

    def rewrite(self, statistics_of: Mapping[str, Any]) -> CallGraph:
        """Returns what this device runs in the place of the whole graph. `statistics_of`: how the statistics of a
        BatchNorm are added up, by its name."""
        self._statistics_of = statistics_of
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}
        self._known: dict[tuple[Any, ...], fx.Node] = {}  # what was made of a node already
        call = self._dims.call
        for node in (*call.inputs, *call.tensors.values(), *call.constants):
            self._new[node] = self._graph.placeholder(node.name)
        for node in call.nodes:
            self._mode = node.meta.get("mode", AROUND)
            self._operator(node, self._dims.ops[node])
        self._mode = AROUND
        returned = [self._returned(value) for value in call.returned]
        self._graph.output(tuple(returned))
        self._graph.lint()
        return CallGraph(
            self._graph,
            [self._new[node] for node in call.inputs],
            {name: self._new[node] for name, node in call.tensors.items()},
            {self._new[node]: tensor for node, tensor in call.constants.items()},
            returned,
            call.structure,
        )

    # ── an operator ──────────────────────────────────────────────────────────────────────────────────────

    def _operator(self, node: fx.Node, op: Op) -> None:
        plan = self._plans[node]
        fitted = {
            operand: self._fitted(operand, plan.needed, plan.target, plan.working(operand))
            for operand in node.all_input_nodes
        }
        groups = [self._axes.groups[axis] for axis in plan.over]
        self._new[node] = self._local(node, op, plan.target, groups, fitted)

    def _works_along(self, node: fx.Node, op: Op, operands: Sequence[fx.Node]) -> tuple[set[Atom], Cuts]:
        """Returns the atoms that must be whole, and those that are in parts with their axes."""
        of_tensors = [dims for operand in operands for dims in _each(self._dims.dims[operand])] + _worked_on(op)
        squares = {leaf for dims in of_tensors for leaf in repeated(dims)}
        needed = {leaf for dim in op.whole for leaf in leaves(dim)} | squares
        kept = {leaf for dim in (*flat_dims(op.out), *op.summed) for leaf in leaves(dim)}
        while True:
            target: Cuts = {}
            for operand in operands:
                target |= {atom: axis for atom, axis in self._cut[operand].items() if atom not in needed}
            # What is neither in the result nor added up would be lost.
            lost = {atom for atom in target if atom not in kept} - self._ended(node, op)
            twice = self._twice(node, op, operands, target) if not lost else None
            if not lost and twice is None:
                break
            needed |= lost if twice is None else {twice}
        if not op.has_rule or any(leaf in squares for operand in operands for leaf in self._cut[operand]):
            elements = sum(math.prod(map(size, self._dims.of(operand))) for operand in operands if self._cut[operand])
            if elements:
                name = name_of(node)
                self.whole[name] = self.whole.get(name, 0) + elements
        return needed, target

    def _ended(self, node: fx.Node, op: Op) -> set[Atom]:
        """Returns the atoms of which an operator finds by itself what comes of them in parts: the classes of a loss."""
        classes = leaves(self._dims.of(given(node)["self"])[1]) if op.kind == "cross entropy" else []
        return set(classes) if len(classes) == 1 else set()

    def _twice(self, node: fx.Node, op: Op, operands: Sequence[fx.Node], target: Cuts) -> Atom | None:
        """Returns an atom of a tensor that would lie along one axis with two dims; refuses a parameter's."""
        of_operands = [(operand, self._dims.dims[operand]) for operand in operands]
        for operand, dims in (*of_operands, *((None, worked_on) for worked_on in _worked_on(op))):
            seen: set[str] = set()
            for atom in {leaf: None for dim in flat_dims(dims) for leaf in leaves(dim) if leaf in target}:
                if target[atom] in seen:
                    if operand is not None and operand in self._names and len(self._cut[operand]) > 1:
                        raise ModelError(
                            "layout",
                            f"two dims along {target[atom]}",
                            f"{self._names[operand]} has both; give them different axes, or one of them another name "
                            "(dims)",
                        )
                    return atom
                seen.add(target[atom])
        return None

    def _fitted(self, operand: fx.Node, needed: set[Atom], target: Cuts, working: set[str]) -> fx.Node:
        """Returns the operand with the parts that the operator works on."""
        dims, found = self._dims.dims[operand], self._new[operand]
        if not isinstance(dims, list):
            return found
        if operand in self._names:
            found = self._as_used(operand, found, working)
        cut = dict(self._cut[operand])
        found = self._refitted(operand, found, dims, cut, needed, target)
        value = self._dims.value(operand)
        if operand not in self._names and isinstance(value, torch.Tensor) and value.is_floating_point():
            for axis in self._axes.groups:
                if axis in working and axis not in cut.values():
                    found = self._once(operand, found, copied, self._axes.groups[axis])
        elif operand in self._names:
            # A part that was put together for an operator that works along the same axis by another dim.
            for axis in set(self._cut[operand].values()) - set(cut.values()):
                if axis in working:
                    found = self._once(operand, found, copied, self._axes.groups[axis])
        return found

    def _as_used(self, operand: fx.Node, found: fx.Node, working: set[str]) -> fx.Node:
        """Has a parameter used as was decided."""
        name, own = self._names[operand], set(self._cut[operand].values())
        for axis in self._axes.groups:
            if axis not in own and axis not in working and self._usage.is_summand(name, axis):
                found = self._once(operand, found, on_parts.heard_once, self._axes.groups[axis])
            elif axis not in own and axis in working and not self._usage.is_summand(name, axis):
                found = self._once(operand, found, copied, self._axes.groups[axis])
        return found

    def _refitted(
        self, operand: fx.Node, found: fx.Node, dims: list[Dim], cut: Cuts, needed: set[Atom], target: Cuts
    ) -> fx.Node:
        flat = operand not in self._names or all(len(leaves(dim)) == 1 for dim in dims) or not cut
        for number, dim in enumerate(dims):
            for leaf in leaves(dim):
                if leaf in cut and leaf in needed:
                    if not flat:  # a parameter's part has a dim for each factor
                        shape = tuple(self._size(dim, cut) for dim in dims)
                        found, flat = self._once(operand, found, torch.reshape, shape), True
                    inner = self._inner(dim, leaf, cut)
                    group = self._axes.groups[cut.pop(leaf)]
                    found = self._once(
                        operand, found, on_parts.put_together, group, number, self._axes.part(leaf), inner
                    )
                elif leaf in target and leaf not in cut:
                    inner = self._inner(dim, leaf, cut)
                    cut[leaf] = target[leaf]
                    group = self._axes.groups[target[leaf]]
                    found = self._once(operand, found, on_parts.take_part, group, number, leaf.size, inner)
        if not flat:
            found = self._once(operand, found, torch.reshape, tuple(self._size(dim, cut) for dim in dims))
        return found

    def _inner(self, dim: Dim, leaf: Atom, cut: Cuts) -> int:
        atoms = leaves(dim)
        return self._size(atoms[atoms.index(leaf) + 1 :], cut)

    def _size(self, dim: Sequence[Atom], cut: Cuts) -> int:
        return math.prod(self._axes.part(atom) if atom in cut else atom.size for atom in leaves(dim)) if dim else 1

    def _once(self, operand: fx.Node, found: fx.Node, function: Any, *arguments: Any) -> fx.Node:
        """Returns a node that does `function` to `found`; for several operators it is done once, unless the operand is
        changed in place somewhere."""
        # Made without gradients it has none for whoever wants some.
        key = (self._mode, found, function, *(id(a) if isinstance(a, DeviceGroup) else a for a in arguments))
        if key not in self._known or operand in self._dims.changing:
            self._known[key] = self._call(function, (found, *arguments))
        return self._known[key]

    def _call(self, function: Any, arguments: tuple[Any, ...]) -> fx.Node:
        """Returns a node that calls `function`. Code is made of a graph: what is not a node goes in with the
        function."""
        nodes: list[fx.Node] = []
        places: list[int] = []
        for place, argument in enumerate(arguments):
            if isinstance(argument, fx.Node):
                places.append(place)
                nodes.append(argument)

        def call(*operands: Any) -> Any:
            filled = list(arguments)
            for place, operand in zip(places, operands, strict=True):
                filled[place] = operand
            return function(*filled)

        call.__name__ = call.__qualname__ = getattr(function, "__name__", "call")
        made = self._graph.call_function(call, tuple(nodes))
        made.meta = {"mode": self._mode}
        return made

    # ── on parts ─────────────────────────────────────────────────────────────────────────────────────────

    def _local(
        self, node: fx.Node, op: Op, target: Cuts, groups: Sequence[DeviceGroup], fitted: dict[fx.Node, fx.Node]
    ) -> fx.Node:
        """Returns what this device computes of an operator, summed where it adds up over parts."""
        build = _ON_PARTS.get(op.kind)
        if build is not None and (target or op.kind in _ALWAYS):
            arguments = {name: _mapped(value, fitted) for name, value in given(node).items()}
            made = build(self, node, op, target, groups, arguments)
            if made is not None:
                return self._call(*made)
        copy = self._graph.node_copy(node, fitted.__getitem__)
        copy.meta = {"mode": self._mode}
        for group in groups:
            copy = self._call(reduced, (copy, group))
        return copy

    def _shape(self, dims: Sequence[Dim], target: Cuts) -> tuple[int, ...]:
        return tuple(self._size(dim, target) for dim in dims)

    def _linear(self, node: fx.Node, op: Op, target: Cuts, groups: Any, a: dict[str, Any]) -> Call:
        return on_parts.linear, (a["input"], a["weight"], a["bias"], groups)

    def _added_product(self, node: fx.Node, op: Op, target: Cuts, groups: Any, a: dict[str, Any]) -> Call:
        return on_parts.added_product, (a["self"], a["mat1"], a["mat2"], groups)

    def _conv(self, node: fx.Node, op: Op, target: Cuts, groups: Any, a: dict[str, Any]) -> Call:
        weight = self._dims.of(given(node)["weight"])
        options = {name: a[name] for name in ("stride", "padding", "dilation")}
        options["groups"] = 1 if a["groups"] == 1 else self._size(weight[0], target)
        return on_parts.convolve, (a["input"], a["weight"], a["bias"], options, groups)

    def _embedding(self, node: fx.Node, op: Op, target: Cuts, groups: Any, a: dict[str, Any]) -> Call | None:
        rows = leaves(self._dims.of(given(node)["weight"])[0])
        if not groups:
            return None
        if len(rows) > 1:
            name = self._names.get(given(node)["weight"], "an embedding")
            raise ModelError("layout", name, "the rows of this embedding are reshaped, and cannot be cut")
        start, _ = self._axes.range(rows[0])
        return on_parts.look_up, (a["indices"], a["weight"], a["padding_idx"], start, groups)

    def _mean(self, node: fx.Node, op: Op, target: Cuts, groups: Any, a: dict[str, Any]) -> Call | None:
        if not groups:
            return None
        rank = len(self._dims.of(node.args[0]))
        asked = a.get("dim")
        dims = list(range(rank)) if not asked and asked != 0 else asked if isinstance(asked, (tuple, list)) else [asked]
        call = self._call(
            on_parts.mean,
            (a["self"], dims, bool(a.get("keepdim")), math.prod(size(d) for d in op.summed), a.get("dtype")),
        )
        return _summed_over, (call, groups)

    def _layer_norm(self, node: fx.Node, op: Op, target: Cuts, groups: Any, a: dict[str, Any]) -> Call | None:
        cut = [leaf for leaf in leaves(op.out[-1]) if leaf in target]
        if not cut:
            return None
        group = self._axes.groups[target[cut[0]]]
        return on_parts.layer_norm, (a["input"], a["weight"], a["bias"], a["eps"], a["normalized_shape"][0], group)

    def _batch_norm(self, node: fx.Node, op: Op, target: Cuts, groups: Any, a: dict[str, Any]) -> Call:
        names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
        module = node.meta.get("modules", [""])[-1:]
        return batch_norm, (*(a[name] for name in names), self._statistics_of.get(*module or [""]))

    def _mask(self, value: torch.Tensor, dims: Sequence[Dim], target: Cuts) -> on_parts.WholeMask:
        cuts = tuple(
            (number, leaf.size, self._inner(dim, leaf, {}), self._axes.groups[target[leaf]])
            for number, dim in enumerate(dims)
            for leaf in leaves(dim)
            if leaf in target
        )
        return on_parts.WholeMask(tuple(value.shape), tuple(value.stride()), cuts)

    def _dropout(self, node: fx.Node, op: Op, target: Cuts, groups: Any, a: dict[str, Any]) -> Call:
        drawn = torch.empty_like(self._dims.value(given(node)["input"]))  # as torch draws it
        return on_parts.dropout, (a["input"], a["p"], self._mask(drawn, op.out, target))

    def _attention(self, node: fx.Node, op: Op, target: Cuts, groups: Any, a: dict[str, Any]) -> Call:
        query, key = given(node)["query"], given(node)["key"]
        shape = (*self._dims.shape(query)[:-1], self._dims.shape(key)[-2])
        mask = self._mask(torch.empty(shape, device="meta"), [*op.out[:-1], self._dims.of(key)[-2]], target)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        return on_parts.attend, (*(a[name] for name in names), mask)

    def _cross_entropy(self, node: fx.Node, op: Op, target: Cuts, groups: Any, a: dict[str, Any]) -> Call | None:
        atom = next((atom for atom in self._ended(node, op) if atom in target), None)
        if atom is None:
            return None
        start, _ = self._axes.range(atom)
        group = self._axes.groups[target[atom]]
        return on_parts.cross_entropy, (a["self"], a["target"], a["reduction"], a["ignore_index"], start, group)

    def _pieces(self, node: fx.Node, op: Op, target: Cuts, groups: Any, a: dict[str, Any]) -> Call:
        return torch.chunk, (a["self"], len(op.out), a["dim"])

    def _reshape(self, node: fx.Node, op: Op, target: Cuts, groups: Any, a: dict[str, Any]) -> Call:
        return torch.reshape, (a["self"], self._shape(op.out, target))

    def _expand(self, node: fx.Node, op: Op, target: Cuts, groups: Any, a: dict[str, Any]) -> Call:
        return torch.Tensor.expand, (a["self"], self._shape(op.out, target))

    # ── what is returned ─────────────────────────────────────────────────────────────────────────────────

    def _returned(self, value: Any) -> Any:
        """Returns a value that the computation returns, made whole."""
        if not isinstance(value, fx.Node):
            return value
        dims = self._dims.dims[value]
        if not isinstance(dims, list) or not self._cut[value]:
            return self._new[value]
        cut = dict(self._cut[value])
        return self._refitted(value, self._new[value], dims, cut, set(cut), {})


def _each(dims: Any) -> list[list[Dim]]:
    """Returns the dims of every tensor that a value is made of."""
    return [part for own in dims for part in _each(own)] if isinstance(dims, tuple) else [dims or []]


def _worked_on(op: Op) -> list[list[Dim]]:
    """Returns the dims that an operator goes over for each tensor that it gives: those of it, and those it adds up."""
    return [[*dims, *op.summed] for dims in _each(op.out)]


def _mapped(value: Any, nodes: Mapping[fx.Node, fx.Node]) -> Any:
    return fx.map_arg(value, nodes.__getitem__) if isinstance(value, (fx.Node, tuple, list)) else value


def _summed_over(found: torch.Tensor, groups: Sequence[DeviceGroup]) -> torch.Tensor:
    for group in groups:
        found = reduced(found, group)
    return found


_ON_PARTS: dict[str, Callable[..., Call | None]] = {
    "linear": GraphRewriter._linear,
    "added product": GraphRewriter._added_product,
    "conv": GraphRewriter._conv,
    "embedding": GraphRewriter._embedding,
    "mean": GraphRewriter._mean,
    "layer norm": GraphRewriter._layer_norm,
    "batch norm": GraphRewriter._batch_norm,
    "dropout": GraphRewriter._dropout,
    "attention": GraphRewriter._attention,
    "cross entropy": GraphRewriter._cross_entropy,
    "pieces": GraphRewriter._pieces,
    "reshape": GraphRewriter._reshape,
    "sizes": GraphRewriter._expand,
}
_ALWAYS = ("linear", "batch norm")  # ours also where nothing is cut: gradients in place, statistics of all replicas
