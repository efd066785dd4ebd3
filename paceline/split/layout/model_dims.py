"""The dims of a model, from the graphs of what is computed with it: which are the same, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from paceline.graph.call_graph import CallGraph
from paceline.graph.in_place import out_of_place
from paceline.optim.models import own_state
from paceline.split.layout.atoms import Atom, Dim, Dims
from paceline.split.layout.graph_dims import GraphDims
from paceline.split.layout.names import Names
from paceline.split.layout.rules import RULES


class ModelDims:
    """The dims of a model's parameters and buffers, and what they are called, from one or more graphs."""

    def __init__(self, model: nn.Module) -> None:
        self._model = own_state(model)
        self.parameters: dict[str, Dims] = {}
        of: dict[torch.Tensor, Dims] = {}  # tied ones are one
        for name, tensor in (
            *self._model.named_parameters(remove_duplicate=False),
            *self._model.named_buffers(remove_duplicate=False),
        ):
            self.parameters[name] = of.setdefault(tensor, [[Atom(size)] for size in tensor.shape])
        self._inputs: list[Dims] = []
        self._seen_as: list[tuple[Dim, str]] = []

    def add(self, call: CallGraph) -> GraphDims:
        """Returns the dims of everything in a graph, joined where they are the same."""
        out_of_place(call)
        found = GraphDims(call, self.parameters)
        found.join(RULES)
        self._inputs += found.inputs
        self._seen_as += found.seen_as
        return found

    def names(self, patterns: Mapping[str, str]) -> Names:
        """Returns the names of all dims, the user's own first."""
        trained = {name: self.parameters[name] for name, _ in self._model.named_parameters()}
        names = Names(trained, self._inputs, self._seen_as)
        names.give(patterns)
        return names
