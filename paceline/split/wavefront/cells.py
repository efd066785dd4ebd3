"""Cells that are used again at every step of a loop, found in the graph of what is computed.

A loop is not in the graph, only what it came to: the same operators with the same weights, once for every time step.

    time 0    x0 ──▶ cell A ──▶ cell B ──▶ …
                       │          │
    time 1    x1 ──▶ cell A ──▶ cell B ──▶ …          A comes back to A and B to B, but B never to A: two layers

An operator with a weight is a *use*, and uses of the same operator with the same weight (or the same thing made of
weights) are of one *kind*. A kind is recurrent if one of its uses follows from another. Kinds that follow from each
other are one *layer*, with all operators on the way around: the gates of a cell, its norms, an attention that is fed
back into its input; and a feedback from the top of a stack to its bottom makes one layer of all of them.

Time counts a layer's steps: what follows from a step is no earlier, and the next use of a recurrent kind is one later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from paceline.errors import ModelError
from paceline.graph.call_graph import CallGraph
from paceline.split.wavefront.dependencies import Dependencies

_MOST_ROUNDS = 8


@dataclass
class Layer:
    """Operators that go around in time: one cell's, or several's that depend on each other."""

    kinds: list[str]
    nodes: list[fx.Node] = field(default_factory=list)
    begin: int = 0  # the time of its first step
    end: int = 0  # and of its last


@dataclass
class Cells:
    """What was found in a graph."""

    kinds: dict[fx.Node, str]  # of operators with weights
    repeated: set[str]  # kinds of several uses
    layers: list[Layer]  # in the order in which they begin
    layer_of: dict[fx.Node, int]
    time: dict[fx.Node, int]  # of all that follows from a layer's steps, and of these


def find_cells(call: CallGraph, dependencies: Dependencies) -> Cells:
    """Returns the layers of a graph, none if nothing repeats in time."""
    kinds = _kinds(call)
    repeated = {kind for kind, count in Counter(kinds.values()).items() if count > 1}
    bits = {kind: 1 << number for number, kind in enumerate(sorted(repeated))}
    own = {node: bits[kind] for node, kind in kinds.items() if kind in repeated}
    above = _gathered(call.nodes, dependencies.before, own)  # kinds from which it follows
    below = _gathered(call.nodes[::-1], dependencies.after, own)  # kinds that follow from it
    reached = dict.fromkeys(repeated, 0)
    for node in own:
        reached[kinds[node]] |= above[node]
    groups = _groups(reached, bits)
    layers = [Layer(kinds=[kind for kind in bits if bits[kind] & group]) for group in groups]
    layer_of: dict[fx.Node, int] = {}
    for node in call.nodes:
        for number, group in enumerate(groups):
            if own.get(node, 0) & group or (above[node] & group and below[node] & group):
                layer_of[node] = number
                layers[number].nodes.append(node)
    first = {number: call.nodes.index(layer.nodes[0]) for number, layer in enumerate(layers)}
    order = sorted(first, key=first.__getitem__)
    layer_of = {node: order.index(number) for node, number in layer_of.items()}
    layers = [layers[number] for number in order]
    recurrent = {kind for layer in layers for kind in layer.kinds}
    time = _times(call, dependencies, {node: kind for node, kind in kinds.items() if kind in recurrent})
    for layer in layers:
        times = [time[node] for node in layer.nodes]
        layer.begin, layer.end = min(times), max(times)
    return Cells(kinds, repeated, layers, layer_of, time)


def _kinds(call: CallGraph) -> dict[fx.Node, str]:
    """Returns by operator which one it is, and with which weights: for operators that have one and something else."""
    numbers: dict[str, str] = {}  # of things made of weights: short names, since things are made of things
    weights: dict[fx.Node, str] = {node: name for name, node in call.tensors.items()}
    weights |= {node: node.name for node in call.constants}
    found: dict[fx.Node, str] = {}
    for node in call.nodes:
        sources = node.all_input_nodes
        if not any(source in weights for source in sources):
            continue
        words = f"{node.target}({_words(node.args, weights)}, {_words(node.kwargs, weights)})"
        if all(source in weights for source in sources):
            weights[node] = numbers.setdefault(words, f"made {len(numbers)}")
        else:
            found[node] = words
    return found


def _words(arguments: Any, weights: Mapping[fx.Node, str]) -> str:
    return str(fx.map_arg(arguments, lambda node: weights.get(node, "·")))


def _gathered(
    nodes: list[fx.Node], sources: Mapping[fx.Node, list[fx.Node]], own: Mapping[fx.Node, int]
) -> dict[fx.Node, int]:
    """Returns the bits of all that a node comes from, not its own."""
    found: dict[fx.Node, int] = {}
    for node in nodes:
        found[node] = 0
        for source in sources[node]:
            found[node] |= found[source] | own.get(source, 0)
    return found


def _groups(reached: Mapping[str, int], bits: Mapping[str, int]) -> list[int]:
    """Returns the recurrent kinds, those together that follow from each other."""
    groups: list[int] = []
    for kind, bit in bits.items():
        if not reached[kind] & bit:
            continue
        mutual = bit
        for other in bits:
            if reached[kind] & bits[other] and reached[other] & bit:
                mutual |= bits[other]
        for group in [group for group in groups if group & mutual]:
            groups.remove(group)
            mutual |= group
        groups.append(mutual)
    return groups


def _times(call: CallGraph, dependencies: Dependencies, recurrent: Mapping[fx.Node, str]) -> dict[fx.Node, int]:
    """Returns the time of all that follows from recurrent uses. What belongs together has that of the last of it."""
    time: dict[fx.Node, int] = {}
    for _ in range(_MOST_ROUNDS):
        before = dict(time)
        last: dict[str, int] = {}
        for node in call.nodes:
            known = [time[source] for source in dependencies.before[node] if source in time]
            if (kind := recurrent.get(node)) is not None:
                known.append(last.get(kind, -1) + 1)
                last[kind] = max(known)
            if known:
                time[node] = max([*known, time.get(node, 0)])
        for together in dependencies.together:
            if known := [time[node] for node in together if node in time]:
                time.update(dict.fromkeys(together, max(known)))
        if time == before:
            return time
    raise ModelError(
        "wavefront",
        dependencies.named(call),
        "it is changed in place in one step of a loop and read in the next; collect the steps in a list, and "
        "torch.stack them",
    )
