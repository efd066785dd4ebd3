"""What has to be computed before what, and what has to be computed together, changes in place included.

An operator that changes a tensor in place comes after all that has used the tensor before, and before all that uses it
afterwards, though the graph does not say so. Whatever lies in memory that is changed is one thing for autograd, and so
belongs into one task; so do the results of an operator that has several.

A buffer, or an input, that is changed is another matter: that is no autograd's, and its users need be on one device.
"""

from __future__ import annotations

import operator

from torch import fx

from paceline.graph.call_graph import CallGraph
from paceline.graph.operators import changed_by, changed_groups


class Dependencies:
    """Those of one graph, between its operators."""

    def __init__(self, call: CallGraph) -> None:
        nodes = call.nodes
        inside = set(nodes)
        self.before: dict[fx.Node, list[fx.Node]] = {}
        self.after: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
        first_in_memory = changed_groups(nodes)
        changed: dict[fx.Node, list[fx.Node]] = {}  # by first in memory: what has used it since it was changed last
        writer: dict[fx.Node, fx.Node] = {}
        together: dict[fx.Node, list[fx.Node]] = {}
        users: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            needs = dict.fromkeys(source for source in node.all_input_nodes if source in inside)
            writes = {first_in_memory.get(operand, operand) for operand in changed_by(node)}
            for first in dict.fromkeys(first_in_memory[s] for s in node.all_input_nodes if s in first_in_memory):
                needs |= dict.fromkeys([writer[first]] if first in writer else [])
                if first in writes:
                    needs |= dict.fromkeys(changed.pop(first, []))
                    writer[first] = node
                changed.setdefault(first, []).append(node)
                if first not in inside:
                    users.setdefault(first, []).append(node)
            needs.pop(node, None)
            self.before[node] = list(needs)
            for source in needs:
                self.after[source].append(node)
            first = first_in_memory.get(node, node)
            if first in inside and first is not node:
                together.setdefault(first, [first]).append(node)
            elif node.target is operator.getitem and node.args[0] in inside:
                together.setdefault(node.args[0], [node.args[0]]).append(node)  # type: ignore[arg-type, list-item]
        self.together = _merged(list(together.values()))  # in one task
        self.on_one_device = list(users.values())  # of a buffer that is changed, or an input
        self._changed = [group[0] for first, group in together.items() if first in first_in_memory]

    def named(self, call: CallGraph) -> str:
        """Returns a name for what is changed in place, to be told."""
        if not self._changed:
            return "a tensor"
        node = self._changed[0]
        where = (node.meta.get("modules") or [""])[-1]
        return f"{node.name} in {where or 'the model'}"


def _merged(groups: list[list[fx.Node]]) -> list[list[fx.Node]]:
    """Returns the groups, those that have a node in common as one."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for group in groups:
        one = list(group)
        for node in group:
            if (other := found.get(node)) is not None and other is not one:
                one += [n for n in other if n not in one]
        found.update(dict.fromkeys(one, one))
    return list({id(group): group for group in found.values()}.values())
