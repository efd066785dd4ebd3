"""The dims of a model, from tracing it: which are the same, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from paceline.split.cut import Example
from paceline.split.layout.atoms import Atom, Dims
from paceline.split.layout.graph import Shapes, follow, on_meta
from paceline.split.layout.graph_dims import GraphDims
from paceline.split.layout.names import Names
from paceline.split.layout.rules import rule_of
from paceline.split.trace import Traced, tensors
from paceline.torch_private import tree_leaves


class ModelDims:
    """The dims of a model's parameters and what they are called, from one or more ways of calling it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._forward = model.forward
        self.meta = on_meta(model)
        self.parameters: dict[str, Dims] = {}
        of: dict[torch.Tensor, Dims] = {}  # tied ones are one
        for name, tensor in (
            *self.meta.named_parameters(remove_duplicate=False),
            *self.meta.named_buffers(remove_duplicate=False),
        ):
            self.parameters[name] = of.setdefault(tensor, [[Atom(size)] for size in tensor.shape])
        self._inputs: list[Dims] = []

    def trace(self, example: Example, *, grad: bool) -> tuple[Traced, GraphDims]:
        """Traces the model, called so, in the mode it is in. Returns the operations and their dims, joined where
        they are the same."""
        traced = follow(self._model, self._forward, example, grad=grad)
        for node in traced.graph.nodes:  # tensors that came from elsewhere have become attributes of the model
            if node.op == "get_attr" and "." not in node.target and not hasattr(self.meta, node.target):
                setattr(self.meta, node.target, torch.empty_like(getattr(self._model, node.target), device="meta"))
        for empty, module in zip(self.meta.modules(), self._model.modules(), strict=True):
            empty.training = module.training
        shapes = Shapes(self.meta, traced.graph).of(tensors(tree_leaves(example)))
        found = GraphDims(self._model, traced.graph, shapes, self.parameters)
        found.join(rule_of)
        self._inputs += found.inputs
        return traced, found

    def names(self, patterns: Mapping[str, str]) -> Names:
        """Returns the names of all dims, the user's own first."""
        trained = {name: self.parameters[name] for name, _ in self.meta.named_parameters()}
        names = Names(self._model, trained, self._inputs)
        names.give(patterns)
        return names
