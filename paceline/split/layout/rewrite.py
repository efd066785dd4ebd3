"""From the dims of a graph, and a layout, to a graph that one device runs on its parts.

Every operator works along the axes that any of its operands lie along. Then:

    an operand that has a dim that is cut elsewhere, and is whole    its part is taken        (`take_part`)
    a dim that the operator needs whole                              is put together before   (`put_together`)
    an operand that does not lie along an axis the operator works on its gradient is summed   (`copied`)
    a dim the operator adds up over                                  the result is summed     (`reduced`)

That is all there is to it, for any number of axes. Where an operator lies along no axis nothing is added, and every
device computes it alike.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from paceline.errors import ModelError
from paceline.exchange.mailboxes import DeviceGroup
from paceline.split.collectives import copied, reduced
from paceline.split.layout import on_parts
from paceline.split.layout.atoms import Atom, Dim, leaves
from paceline.split.layout.axes import Axes, Cuts, Usage
from paceline.split.layout.graph_dims import GraphDims, Op, flat_dims
from paceline.torch_private import tree_flatten, tree_unflatten


class GraphRewriter:
    """Rewrites a graph, of which the dims are known, for this device."""

    def __init__(self, dims: GraphDims, axes: Axes, usage: Usage) -> None:
        self._graph_dims = dims
        self._graph = dims.graph
        self._axes = axes
        self._usage = usage
        self._cut: dict[fx.Node, Cuts] = {}
        self._known: dict[tuple[Any, ...], fx.Node] = {}  # what was made of a node already

    def rewrite(self) -> fx.GraphModule:
        """Returns what this device runs in the place of the model's forward."""
        for node in list(self._graph.nodes):
            op = self._graph_dims.ops[node]
            if node.op == "placeholder":
                self._cut[node] = {}
            elif node.op == "get_attr":
                self._cut[node] = (
                    self._axes.cuts(flat_dims(op.out)) if str(node.target) in self._graph_dims.parameters else {}
                )
            elif node.op == "output":
                self._put_all_together(node)
            elif op.out is None:
                self._plain_numbers(node)
            else:
                self._operator(node, op)
        self._graph.lint()
        return fx.GraphModule(self._graph_dims.model, self._graph)

    # ── an operator ──────────────────────────────────────────────────────────────────────────────────────

    def _operator(self, node: fx.Node, op: Op) -> None:
        axes = self._axes
        needed = {leaf for dim in op.whole for leaf in leaves(dim)}
        own = {name: axes.cuts(dims) for name, dims in op.parameters.items()}
        for name, cuts in own.items():
            for atom in cuts:
                if atom in needed:
                    raise ModelError(
                        "layout",
                        f"{node.target}.{name}",
                        f"{self._what(node)} cannot be cut along that dim; leave it out of the layout, or name this "
                        "one otherwise (dims)",
                    )
        operands = [
            operand for operand in node.all_input_nodes if isinstance(self._graph_dims.dims[operand], (list, tuple))
        ]
        target: Cuts = {}
        for cuts in (*own.values(), *(self._cut[operand] for operand in operands)):
            target |= {atom: axis for atom, axis in cuts.items() if atom not in needed}
        self._check_axes(node, op, target)
        working = set(target.values())
        new: dict[fx.Node, fx.Node] = {}
        with self._graph.inserting_before(node):
            for operand in operands:
                new[operand] = self._fitted(operand, needed, target, working)
        for operand, fitted in new.items():
            node.replace_input_with(operand, fitted)
        for operand in operands:
            if operand.op == "get_attr" and str(operand.target) in self._graph_dims.parameters:
                self._usage.note(self._graph_dims.first_name(str(operand.target)), axes, self._cut[operand], working)
        summed = {leaf for dim in op.summed for leaf in leaves(dim)}
        over = [target[atom] for atom in target if atom in summed]
        out_atoms = {leaf for dim in flat_dims(op.out) for leaf in leaves(dim)}
        for name, cuts in own.items():
            # What is added after the sum is not part of the summands.
            late = set(over) if name in op.late else set()
            self._usage.note(self._graph_dims.first_name(f"{node.target}.{name}"), axes, cuts, working - late)
        result = self._local(node, op, target, over)
        cut = {atom: axis for atom, axis in target.items() if atom in out_atoms}
        self._cut[result] = cut
        if result is not node:
            self._graph_dims.dims[result] = self._graph_dims.dims[node]

    def _what(self, node: fx.Node) -> str:
        return type(self._graph_dims.module(node)).__name__ if node.op == "call_module" else str(node.target)

    def _check_axes(self, node: fx.Node, op: Op, target: Cuts) -> None:
        dims = [*op.parameters.values(), *([op.out] if isinstance(op.out, list) else op.out)]
        for of_one in dims:
            axes = [axis for atom, axis in self._axes.cuts(of_one or []).items() if atom in target]
            twice = next((axis for axis in axes if axes.count(axis) > 1), None)
            if twice is not None:
                raise ModelError(
                    "layout",
                    f"two dims along {twice}",
                    f"{self._what(node)} {node.name} has both in one tensor; give them different axes, or one of them "
                    "another name (dims)",
                )

    def _fitted(self, operand: fx.Node, needed: set[Atom], target: Cuts, working: set[str]) -> fx.Node:
        """Returns the operand with the parts that the operator works on."""
        dims = self._graph_dims.dims[operand]
        if isinstance(dims, tuple):
            return operand
        cut = dict(self._cut[operand])
        found = operand
        for number, dim in enumerate(dims):
            for leaf in leaves(dim):
                if leaf in cut and leaf in needed:
                    inner = self._inner(dim, leaf, cut)
                    group = self._axes.groups[cut.pop(leaf)]
                    found = self._once(found, on_parts.put_together, group, number, self._axes.part(leaf), inner)
                elif leaf in target and leaf not in cut:
                    inner = self._inner(dim, leaf, cut)
                    cut[leaf] = target[leaf]
                    found = self._once(
                        found, on_parts.take_part, self._axes.groups[target[leaf]], number, leaf.size, inner
                    )
        self._keep(operand, found, cut)
        value = self._graph_dims.values.get(operand.name)
        if operand.op != "get_attr" and isinstance(value, torch.Tensor) and value.is_floating_point():
            for axis in self._axes.groups:
                if axis in working and axis not in cut.values():
                    found = self._once(found, copied, self._axes.groups[axis])
                    self._keep(operand, found, cut)
        return found

    def _keep(self, origin: fx.Node, made: fx.Node, cut: Cuts) -> None:
        self._cut[made] = cut
        self._graph_dims.dims[made] = self._graph_dims.dims[origin]
        self._graph_dims.values.setdefault(made.name, self._graph_dims.values.get(origin.name))

    def _inner(self, dim: Dim, leaf: Atom, cut: Cuts) -> int:
        atoms = leaves(dim)
        behind = atoms[atoms.index(leaf) + 1 :]
        return math.prod(self._axes.part(atom) if atom in cut else atom.size for atom in behind)

    def _once(self, node: fx.Node, function: Any, *arguments: Any) -> fx.Node:
        """Returns a node that does `function` to `node`; for several operators it is done once, right behind the
        node."""
        key = (node, function, *(id(a) if isinstance(a, DeviceGroup) else a for a in arguments))
        if key not in self._known:
            after = node.next
            while after.op == "placeholder":
                after = after.next
            with self._graph.inserting_before(after):
                self._known[key] = self._call(function, (node, *arguments))
        return self._known[key]

    def _call(self, function: Any, arguments: tuple[Any, ...]) -> fx.Node:
        """A node that calls `function`. Code is made of a graph: what is not a node goes in with the function."""
        given, structure = tree_flatten(arguments)
        nodes = [leaf for leaf in given if isinstance(leaf, fx.Node)]

        places = [place for place, leaf in enumerate(given) if isinstance(leaf, fx.Node)]
        flat = len(given) == len(arguments) and all(map(operator.is_, given, arguments))

        def call(*operands: Any) -> Any:
            filled = list(given)
            for place, operand in zip(places, operands, strict=True):
                filled[place] = operand
            return function(*(filled if flat else tree_unflatten(filled, structure)))

        call.__name__ = function.__name__
        return self._graph.call_function(call, tuple(nodes))

    # ── operators that are others on parts ───────────────────────────────────────────────────────────────

    def _local(self, node: fx.Node, op: Op, target: Cuts, over: list[str]) -> fx.Node:
        """Returns the node that does on parts what `node` does on whole tensors: another operator, if its kind has
        one here (`_linear`, `_conv` …), and else the same with its result summed."""
        groups = tuple(self._axes.groups[axis] for axis in dict.fromkeys(over))
        on_these_parts = _ON_PARTS.get(op.kind) if target else None
        if on_these_parts is None:
            return self._summed(node, op, groups)
        function, arguments = on_these_parts(self, node, op, target, groups)
        with self._graph.inserting_before(node):
            made = self._call(function, arguments)
        node.replace_all_uses_with(made)
        self._graph_dims.values[made.name] = self._graph_dims.values[node.name]
        self._graph.erase_node(node)
        return made

    def _summed(self, node: fx.Node, op: Op, groups: Sequence[DeviceGroup]) -> fx.Node:
        for group in groups:
            with self._graph.inserting_after(node):
                total = self._call(reduced, (node, group))
            node.replace_all_uses_with(total, delete_user_cb=partial(operator.is_not, total))
            self._graph_dims.ops[total] = op
            node = total
        return node

    def _own(self, node: fx.Node, name: str) -> fx.Node | None:
        if name not in self._graph_dims.ops[node].parameters:
            return None
        with self._graph.inserting_before(node):
            return self._graph.get_attr(f"{node.target}.{name}")

    def _size(self, dim: Dim) -> int:
        return math.prod(self._axes.part(leaf) for leaf in leaves(dim))

    def _linear(self, node: fx.Node, op: Op, target: Cuts, groups: Any) -> tuple[Any, tuple[Any, ...]]:
        shape = tuple(self._size(dim) for dim in op.parameters["weight"])
        return on_parts.linear, (node.args[0], self._own(node, "weight"), self._own(node, "bias"), shape, groups)

    def _conv(self, node: fx.Node, op: Op, target: Cuts, groups: Any) -> tuple[Any, tuple[Any, ...]]:
        module: Any = self._graph_dims.module(node)
        count = 1 if module.groups == 1 else self._size(op.parameters["weight"][0])
        weight, bias = self._own(node, "weight"), self._own(node, "bias")
        return on_parts.convolve, (node.args[0], weight, bias, module, count, groups)

    def _embedding(self, node: fx.Node, op: Op, target: Cuts, groups: Any) -> tuple[Any, tuple[Any, ...]]:
        module: Any = self._graph_dims.module(node)
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise ModelError(
                "layout", str(node.target), "an embedding with max_norm, by frequency or sparse is not cut"
            )
        (atom, *inner) = leaves(op.parameters["weight"][0])
        if inner:
            raise ModelError("layout", str(node.target), "the rows of this embedding are reshaped, and cannot be cut")
        return on_parts.look_up, (node.args[0], self._own(node, "weight"), module, self._axes.range(atom)[0], groups)

    def _layer_norm(self, node: fx.Node, op: Op, target: Cuts, groups: Any) -> tuple[Any, tuple[Any, ...]]:
        module: Any = self._graph_dims.module(node)
        cut = [leaf for leaf in leaves(op.out[-1]) if leaf in target]
        weight, bias = self._own(node, "weight"), self._own(node, "bias")
        if not cut:
            return torch.nn.functional.layer_norm, (node.args[0], module.normalized_shape, weight, bias, module.eps)
        group = self._axes.groups[target[cut[0]]]
        return on_parts.layer_norm, (node.args[0], weight, bias, module.eps, module.normalized_shape[0], group)

    def _dropout(self, node: fx.Node, op: Op, target: Cuts, groups: Any) -> tuple[Any, tuple[Any, ...]]:
        cuts = tuple(
            (number, leaf.size, self._inner(dim, leaf, target), self._axes.groups[target[leaf]])
            for number, dim in enumerate(op.out)
            for leaf in leaves(dim)
            if leaf in target
        )
        if node.op == "call_module":
            return on_parts.dropout_module, (node.args[0], self._graph_dims.module(node), cuts)
        bound = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | dict(node.kwargs)
        return on_parts.dropout, (node.args[0], bound.get("p", 0.5), bound.get("training", True), cuts)

    def _heads(self, node: fx.Node, op: Op, target: Cuts, groups: Any) -> tuple[Any, tuple[Any, ...]]:
        names = list(inspect.signature(nn.MultiheadAttention.forward).parameters)[1:]
        options = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        q, k, v = (options.pop(name) for name in names[:3])
        _, heads, _ = leaves(op.parameters["in_proj_weight"][0])
        return on_parts.attend, (q, k, v, self._graph_dims.module(node), self._axes.part(heads), groups, options)

    def _pieces(self, node: fx.Node, op: Op, target: Cuts, groups: Any) -> tuple[Any, tuple[Any, ...]]:
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
        return torch.chunk, (node.args[0], len(op.out), dim)

    def _reshape(self, node: fx.Node, op: Op, target: Cuts, groups: Any) -> tuple[Any, tuple[Any, ...]]:
        """Sizes follow from the atoms, where these are a model's own; others, of a batch, are what they are."""
        source = self._graph_dims.of(node.args[0])
        given = list(self._graph_dims.values[node.name].shape)
        asked: Any = node.args[1:]
        if len(asked) == 1 and isinstance(asked[0], (tuple, list)):
            asked = asked[0]
        named = str(node.target) in ("view", "reshape") or node.target is torch.reshape
        shape: list[Any] = []
        for number, dim in enumerate(op.out):
            atoms = leaves(dim)
            if any(atom in target for atom in atoms):
                shape.append(math.prod(self._axes.part(atom) for atom in atoms))
            elif named and len(asked) == len(given):
                shape.append(asked[number])
            elif (at := next((k for k, d in enumerate(source) if leaves(d) == atoms), None)) is not None:
                with self._graph.inserting_before(node):
                    shape.append(self._graph.call_method("size", (node.args[0], at)))
            else:
                shape.append(-1 if -1 not in shape else given[number])
        return on_parts.view, (node.args[0], tuple(shape))

    # ── the rest ─────────────────────────────────────────────────────────────────────────────────────────

    def _plain_numbers(self, node: fx.Node) -> None:
        """Gives sizes and the like of whole tensors to a model that asks for them."""
        for operand in node.all_input_nodes:
            dims = self._graph_dims.dims[operand]
            if not isinstance(dims, list) or not self._cut.get(operand):
                continue
            fixed = self._whole_sizes(node, dims)
            if fixed is not None:
                with self._graph.inserting_before(node):
                    which = node.args[1] if node.target == "size" and len(node.args) > 1 else None
                    made = self._call(_sizes, (operand, fixed, which))
                node.replace_all_uses_with(made)
                self._graph_dims.dims[made] = None
                self._cut[made] = {}
                self._graph.erase_node(node)
                return
        self._cut[node] = {}

    def _whole_sizes(self, node: fx.Node, dims: list[Dim]) -> tuple[int | None, ...] | None:
        """Returns, for x.size() and x.shape of a tensor in parts, the whole sizes of the dims that are cut."""
        asks = node.target == "size" or (node.target is getattr and node.args[1] == "shape")
        if not asks:
            return None
        return tuple(
            math.prod(leaf.size for leaf in leaves(dim)) if any(self._axes.of(leaf) for leaf in leaves(dim)) else None
            for dim in dims
        )

    def _put_all_together(self, node: fx.Node) -> None:
        """Makes whole what the model returns."""
        for operand in list(node.all_input_nodes):
            dims = self._graph_dims.dims[operand]
            if isinstance(dims, list) and self._cut.get(operand):
                needed = set(self._cut[operand])
                with self._graph.inserting_before(node):
                    node.replace_input_with(operand, self._fitted(operand, needed, {}, set()))


_ON_PARTS = {
    "linear": GraphRewriter._linear,
    "conv": GraphRewriter._conv,
    "embedding": GraphRewriter._embedding,
    "layer norm": GraphRewriter._layer_norm,
    "dropout": GraphRewriter._dropout,
    "heads": GraphRewriter._heads,
    "pieces": GraphRewriter._pieces,
    "reshape": GraphRewriter._reshape,
}


def _sizes(x: torch.Tensor, whole: tuple[int | None, ...], which: Any) -> Any:
    sizes = torch.Size([own if fixed is None else fixed for own, fixed in zip(x.shape, whole, strict=True)])
    return sizes[which] if isinstance(which, int) else sizes
