"""Changes in place that nobody else sees, as operators that give something new: `relu_` of a result is `relu`.

Who cuts a graph by dims can say nothing of a tensor that changes, since others may see it, and has it whole on every
device. Most such changes only save memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from paceline.graph.call_graph import CallGraph
from paceline.graph.operators import changed_by, name_of, shared_with
from paceline.torch_private import schema_of


def out_of_place(call: CallGraph) -> None:
    """Has operators of a graph give something new where they change a value that is not used any more."""
    nodes = call.nodes
    position = {node: number for number, node in enumerate(nodes)}
    in_memory: dict[fx.Node, list[fx.Node]] = {}  # by the first value in it: what may share it
    first: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        new = _new(call, node, first, in_memory, position)
        if new is not None:
            node.target = new
        first[node] = node if new is not None else next((first.get(o, o) for o in shared_with(node)), node)
        in_memory.setdefault(first[node], []).append(node)


def _new(
    call: CallGraph,
    node: fx.Node,
    first: dict[fx.Node, fx.Node],
    in_memory: dict[fx.Node, list[fx.Node]],
    position: dict[fx.Node, int],
) -> Any:
    """Returns the operator that does the same and gives something new; None if somebody would see the difference."""
    changed = list(changed_by(node))
    name = name_of(node)
    schema = schema_of(node.target)
    if not name.endswith("_") or name.endswith("__") or len(changed) != 1 or changed[0] is not node.args[0]:
        return None
    others = getattr(torch.ops.aten, name[:-1], None)
    new = getattr(others, schema.overload_name or "default", None)
    if new is None or len(schema_of(new).arguments) != len(schema.arguments):
        return None
    if changed[0] not in first or first[changed[0]] not in position:  # a parameter, a buffer, an input
        return None
    used_later = any(
        position.get(user, len(position)) > position[node]
        for value in in_memory[first[changed[0]]]
        for user in value.users
        if user is not node
    )
    kinds = [value.dtype for operand in node.all_input_nodes if isinstance(value := call.values[operand], torch.Tensor)]
    promoted = kinds[0]
    for kind in kinds[1:]:
        promoted = torch.promote_types(promoted, kind)
    return new if not used_later and promoted == call.values[changed[0]].dtype else None
