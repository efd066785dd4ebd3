"""One stage's part of a graph: what it needs from others, what it computes, what it gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from paceline.graph.call_graph import CallGraph
from paceline.graph.operators import name_of
from paceline.optim.batchnorm import Statistics
from paceline.seeds import mixed
from paceline.split.layout.graph_dims import given
from paceline.split.layout.on_parts import batch_norm


class StagePart:
    """What stage `stage` does of a graph that is cut at `places`."""

    def __init__(
        self,
        call: CallGraph,
        places: Sequence[int],
        stage: int,
        random: Sequence[int],
        statistics: Mapping[str, Statistics],
    ) -> None:
        self.call = call
        self._seed: int | None = None  # of the micro-batch
        last = len(places)
        nodes = call.nodes
        stage_of = {node: sum(place <= number for place in places) for number, node in enumerate(nodes)}
        self.returned = [value for value in call.returned if isinstance(value, fx.Node)]
        # By stage: values that it needs of earlier ones, in the order of the graph.
        needed: list[dict[fx.Node, None]] = [{} for _ in range(last + 1)]
        for node in nodes:
            for user in node.users:
                target = stage_of.get(user, last)
                if target > stage_of[node]:
                    needed[target][node] = None
        self.takes = {source: [node for node in needed[stage] if stage_of[node] == source] for source in range(stage)}
        self.gives = {
            target: [node for node in needed[target] if stage_of[node] == stage]
            for target in range(stage + 1, last + 1)
        }
        own = [node for node in nodes if stage_of[node] == stage]
        self._keeps = list(dict.fromkeys(node for group in self.gives.values() for node in group))
        if stage == last:
            self._keeps = list(dict.fromkeys(node for node in self.returned if stage_of.get(node) == stage))
        mine = set(own)
        self._arguments = list(dict.fromkeys(s for node in own for s in node.all_input_nodes if s not in mine))
        drawing = {number for number in random if stage_of[nodes[number]] == stage}
        between = {nodes[number]: partial(self._draw_for, number) for number in drawing}
        needed_here = {*self._arguments, *self.returned}
        self._named = {node: name for node, name in call.names.items() if node in needed_here}
        for node in own:
            _make_local(node, statistics)
        self._run = call.runs(own, self._arguments, self._keeps, between)

    def run(self, values: dict[fx.Node, Any], tensors: Mapping[str, torch.Tensor], seed: int | None) -> None:
        """Runs it. `values` has inputs and what came from other stages, and gets what others need; `tensors` are the
        parameters and buffers. Random numbers follow from the seed, which is that of the micro-batch, and the
        operator: where a model is cut makes no difference to its dropout. Without one they are whatever comes next."""
        self._seed = seed
        values |= {node: tensors[name] for node, name in self._named.items()}
        values |= self.call.constants
        found = self._run(*(values[node] for node in self._arguments))
        values.update(zip(self._keeps, found, strict=True))

    def _draw_for(self, number: int) -> None:
        if self._seed is not None:
            torch.default_generator.manual_seed(mixed(self._seed, number))


def _make_local(node: fx.Node, statistics: Mapping[str, Statistics]) -> None:
    """Has an operator be the one that a module would have called: one that knows where its gradient goes, or over which
    replicas its statistics are."""
    name = name_of(node)
    if name == "linear":
        node.target = _linear
    elif name == "batch_norm" and (found := statistics.get((node.meta.get("modules") or [""])[-1])) is not None:
        a = given(node)
        names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
        node.args, node.kwargs = tuple(a[name] for name in names), {}
        node.target = _with(found)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _with(statistics: Statistics) -> Callable[..., torch.Tensor]:
    def normalize(*arguments: Any) -> torch.Tensor:
        return batch_norm(*(*arguments, statistics))

    return normalize
