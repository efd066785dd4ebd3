"""The dims of a model, from tracing it: which are the same, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.split.layout.atoms import Atom, Dims
from paceline.split.layout.graph import Call, Shapes, on_meta, trace
from paceline.split.layout.names import Names
from paceline.split.layout.rules import Trace


class Dimensions:
    """The dims of a model's parameters and what they are called, from one or more ways of calling it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.meta = on_meta(model)
        self.parameters: dict[str, Dims] = {}
        of: dict[torch.Tensor, Dims] = {}  # tied ones are one
        for name, tensor in (
            *self.meta.named_parameters(remove_duplicate=False),
            *self.meta.named_buffers(remove_duplicate=False),
        ):
            self.parameters[name] = of.setdefault(tensor, [[Atom(size)] for size in tensor.shape])
        self.traces: dict[tuple[Any, ...], Trace] = {}

    def trace(self, call: Call) -> Trace:
        """The model called so, with all dims that are the same joined."""
        graph = trace(self._model, call)
        for node in graph.nodes:  # tensors that the forward has made have become attributes of the model
            if node.op == "get_attr" and "." not in node.target and not hasattr(self.meta, node.target):
                setattr(self.meta, node.target, torch.empty_like(getattr(self._model, node.target), device="meta"))
        shapes = Shapes(self.meta.train(call.training), graph)
        with torch.no_grad():
            shapes.run(*[torch.empty_like(tensor, device="meta") for tensor in call.tensors])
        self.traces[call.key] = found = Trace(self._model, graph, shapes.found, self.parameters)
        found.run()
        return found

    def names(self, patterns: Mapping[str, str]) -> Names:
        trained = {name: self.parameters[name] for name, _ in self.meta.named_parameters()}
        names = Names(self._model, trained, [dims for found in self.traces.values() for dims in found.inputs])
        names.give(patterns)
        return names
