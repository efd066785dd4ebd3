"""What can be said of one operator of a graph, from its schema: its name, what it changes, whose memory it shares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from paceline.graph.whole import WholeCall
from paceline.torch_private import schema_of


def name_of(node: fx.Node) -> str:
    """Returns an operator's name: `linear`, `add_`; of a function that is none of torch's, the function's.

    >>> import torch
    >>> graph = fx.Graph()
    >>> name_of(graph.call_function(torch.ops.aten.add_.Tensor, (graph.placeholder("x"), 1)))
    'add_'
    """
    schema = schema_of(node.target)
    if schema is None:
        return getattr(node.target, "__name__", str(node.target))
    return str(schema.name).rpartition("::")[2]


def given(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of an operator by the names in its schema, defaults included."""
    arguments = schema_of(node.target).arguments
    found = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    found |= {argument.name: value for argument, value in zip(arguments, node.args, strict=False)}
    return found | dict(node.kwargs)


def changed_by(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the operands that an operator changes in place."""
    yield from _aliased(node, writes=True)


def shared_with(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the operands whose memory an operator's result may share."""
    yield from _aliased(node, writes=False)


def changes_unsaid(name: str) -> bool:
    """Returns whether an operator changes statistics that it is given, which its schema does not say."""
    return name in ("aten::batch_norm", "aten::native_batch_norm")


def _aliased(node: fx.Node, *, writes: bool) -> Iterator[fx.Node]:
    if isinstance(node.target, WholeCall):  # it may change its buffers, and return what it is given
        buffers = node.args[len(node.args) - node.target.buffers :]
        yield from (operand for operand in (buffers if writes else node.args) if isinstance(operand, fx.Node))
        return
    schema = schema_of(node.target)
    if schema is None:  # getitem: one of several results, which may be views
        yield from () if writes else node.all_input_nodes
        return
    if writes and changes_unsaid(schema.name) and node.args[5]:
        yield from (operand for operand in node.args[3:5] if isinstance(operand, fx.Node))
    if node.target in _MAY_SHARE and not writes:
        yield from node.all_input_nodes[:1]
    for number, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is None or (writes and not alias.is_write):
            continue
        given: Any = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
        for operand in given if isinstance(given, (tuple, list)) else (given,):
            if isinstance(operand, fx.Node):
                yield operand


def _may_share() -> frozenset[Any]:
    import torch

    aten = torch.ops.aten
    return frozenset(
        (
            aten.reshape.default, aten.contiguous.default, aten.flatten.using_ints, aten.to.dtype, aten.to.device,
            aten.to.dtype_layout, aten.to.other, aten.type_as.default, aten.dropout.default,
        )
    )  # fmt: skip


_MAY_SHARE = _may_share()  # whose schema says nothing of it, and which return their operand where they can


def changed_groups(nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Returns, for every value that is changed in place somewhere, or shares memory with one that is, the first value
    in that memory."""
    base: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        base[node] = next((base.get(operand, operand) for operand in shared_with(node)), node)
    changed = {base.get(operand, operand) for node in nodes for operand in changed_by(node)}
    found = {node: first for node, first in base.items() if first in changed}
    return found | {first: first for first in changed}
