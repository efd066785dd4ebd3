"""One stage's part of a list of operations: what it needs from others, what it computes, what it gives them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from paceline.seeds import mixed
from paceline.split.trace import Traced


class OperationSeeds:
    """Random numbers that follow from the micro-batch and the operation, and not from who does it: where a model is
    cut makes no difference to its dropout."""

    def __init__(self, seed: int | None) -> None:
        """Without a seed operations draw whatever comes next."""
        self._seed = seed

    def begin(self, number: int) -> None:
        """Seeds the generator for the operation with this number."""
        if self._seed is not None:
            torch.default_generator.manual_seed(mixed(self._seed, number))


class StageModule:
    """What stage `stage` does of `traced`, which is cut at `places`, as a module that can be run."""

    def __init__(
        self, model: nn.Module, traced: Traced, places: Sequence[int], stage: int, random: Sequence[int]
    ) -> None:
        self.traced = traced
        self._stages = len(places) + 1
        nodes = traced.nodes
        stage_of = {node: sum(place <= number for place in places) for number, node in enumerate(nodes)}
        self.returned = [node for node in _behind(traced.output) if node in stage_of]  # by whichever stage
        # By stage: values that it needs of earlier ones, in the order of the graph.
        needed: list[dict[fx.Node, None]] = [{} for _ in range(self._stages)]
        for node in nodes:
            for user in node.users:
                target = stage_of.get(user, self._stages - 1)
                if target > stage_of[node]:
                    needed[target][node] = None
        self.takes = {source: [node for node in needed[stage] if stage_of[node] == source] for source in range(stage)}
        self.gives = {
            target: [node for node in needed[target] if stage_of[node] == stage]
            for target in range(stage + 1, self._stages)
        }
        own = [node for node in nodes if stage_of[node] == stage]
        last = stage == self._stages - 1
        self._keeps = list(dict.fromkeys([node for given in self.gives.values() for node in given]))
        if last:
            self._keeps = [node for node in self.returned if stage_of[node] == stage]
        taken = [node for group in self.takes.values() for node in group]
        self._module, self._arguments = _build(model, traced, own, taken, self._keeps, set(random))

    def run(self, values: dict[fx.Node, Any], seeds: OperationSeeds) -> None:
        """Runs it. `values` has inputs of the model and what came from other stages, and gets what others need."""
        arguments = [values.get(node) for node in self._arguments]
        values.update(zip(self._keeps, self._module.forward(seeds, *arguments), strict=True))

    def output(self, values: dict[fx.Node, Any], model: nn.Module) -> Any:
        """Returns what the model returns."""

        def value_of(node: fx.Node) -> Any:
            if node.op == "get_attr":
                return operator.attrgetter(str(node.target))(model)
            if _makes_a_record(node):
                return node.target(*fx.map_arg(node.args, value_of), **fx.map_arg(node.kwargs, value_of))  # type: ignore[operator]
            return values[node]

        return _plain(fx.map_arg(self.traced.output, value_of))


def _makes_a_record(node: fx.Node) -> bool:
    """Returns whether the node makes a value of a user's own kind out of tensors. Such a value is made anew on every
    device, and does not travel."""
    return node.op == "call_function" and isinstance(node.target, type)


def _behind(output: Any) -> list[fx.Node]:
    """Returns the nodes whose values an output is made of."""
    found: dict[fx.Node, None] = {}

    def note(node: fx.Node) -> fx.Node:
        if _makes_a_record(node):
            fx.map_arg((node.args, node.kwargs), note)
        else:
            found[node] = None
        return node

    fx.map_arg(output, note)
    return list(found)


def _build(
    model: nn.Module,
    traced: Traced,
    own: Sequence[fx.Node],
    taken: Sequence[fx.Node],
    keeps: Sequence[fx.Node],
    random: set[int],
) -> tuple[nn.Module, list[fx.Node]]:
    """Returns a module of these operations, and the values it is called with after the seeds."""
    graph = fx.Graph()
    seeds = graph.placeholder("seeds")
    number_of = {node: number for number, node in enumerate(traced.nodes)}
    mine = set(own)
    outside = {source: None for node in own for source in node.all_input_nodes if source not in mine}
    arguments = [node for node in outside if node.op != "get_attr"]
    assert set(arguments) <= {*traced.inputs, *taken}
    copies = {node: graph.placeholder(node.name) for node in arguments}
    copies |= {node: graph.node_copy(node) for node in outside if node.op == "get_attr"}
    for node in own:
        if number_of[node] in random:
            graph.call_method("begin", (seeds, number_of[node]))
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in keeps))
    return fx.GraphModule(model, graph, "Stage"), arguments


def _plain(value: Any) -> Any:
    """Returns an output that can be changed, as a user's can; lists and dicts of torch.fx cannot."""
    if isinstance(value, tuple):
        entries = [_plain(entry) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return value
