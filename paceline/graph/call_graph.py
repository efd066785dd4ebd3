"""One computation as a graph of operators: what it takes, its operators one after another, what it returns.

    inputs      tensors of the batch, or arguments of a call, in order
    tensors     parameters and buffers of the model that are used, by their first name
    constants   other tensors that the computation found somewhere

All of these are placeholders of the graph, so whoever runs it, or a part of it, decides what stands there: a whole
parameter, one device's part of it. The graph is flat: what a module, a loop or a `with` came to. A node says in which
module of the model it lies, and in which *mode* it runs where that is not the mode around it (`torch.no_grad`,
autocast).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from paceline.graph.inputs import Structure

Mode = tuple[
    bool | None, tuple[str, torch.dtype, bool] | None
]  # gradients on or off; autocast: device, type, on or off
AROUND: Mode = (None, None)  # as it is around the graph


@dataclass
class CallGraph:
    """The graph of one way to call one function with one model."""

    graph: fx.Graph
    inputs: list[fx.Node]
    tensors: dict[str, fx.Node]
    constants: dict[fx.Node, torch.Tensor]
    returned: list[Any]  # a node or a tensor each
    structure: Structure  # of what is returned
    values: dict[fx.Node, Any] = field(default_factory=dict)  # of every node, as tensors without values

    @property
    def nodes(self) -> list[fx.Node]:
        """Returns the operators."""
        return [node for node in self.graph.nodes if node.op == "call_function"]

    @property
    def names(self) -> dict[fx.Node, str]:
        """Returns the names of the parameters and buffers, by their nodes."""
        return {node: name for name, node in self.tensors.items()}

    def runs(
        self,
        nodes: Sequence[fx.Node],
        takes: Sequence[fx.Node],
        gives: Sequence[fx.Node],
        between: Mapping[fx.Node, Callable[[], None]] | None = None,
    ) -> Runs:
        """Returns these operators as something that can be called with the values of `takes`, and returns those of
        `gives`. `between`: a function to be called before a node."""
        return Runs(nodes, takes, gives, between or {})


class Runs:
    """Some operators of a graph, in code."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        takes: Sequence[fx.Node],
        gives: Sequence[fx.Node],
        between: Mapping[fx.Node, Callable[[], None]],
    ) -> None:
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in takes}
        mode = AROUND
        for node in nodes:
            now = node.meta.get("mode", AROUND)
            if now != mode:
                graph.call_function(_named(partial(self._switch, now), "switch_mode"))
                mode = now
            if node in between:
                graph.call_function(_named(between[node], "begin"))
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {}
        graph.output(tuple(copies[node] for node in gives))
        self._module = fx.GraphModule(nn.Module(), graph, "Step")
        self._switches = any(node.meta.get("mode", AROUND) != AROUND for node in nodes)
        self._around = (True, torch.float32, False)  # gradients; autocast, its type and whether it is on

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        if not self._switches:
            return self._module.forward(*values)  # type: ignore[no-any-return]
        self._around = torch.is_grad_enabled(), torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
        try:
            return self._module.forward(*values)  # type: ignore[no-any-return]
        finally:
            self._switch(AROUND)

    def _switch(self, mode: Mode) -> None:
        grad, autocast = mode
        torch.set_grad_enabled(grad if grad is not None else self._around[0])
        device, kind, on = autocast if autocast is not None else ("cpu", *self._around[1:])
        torch.set_autocast_dtype(device, kind)
        torch.set_autocast_enabled(device, on)


def _named(function: Callable[[], None], name: str) -> Callable[[], None]:
    """Returns a function that code made of a graph can call: that needs a name of its own."""

    def call() -> None:
        function()

    call.__name__ = call.__qualname__ = name
    return call
