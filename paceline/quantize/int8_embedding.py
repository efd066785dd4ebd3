"""A table of rows in int8, each row with its own scale. A table that is tied to a linear layer shares its tensor: a row
here is an output there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from paceline.quantize.int8_layer import Int8Layer, Tensors
from paceline.quantize.rounding import InputRange, Int8Weight


class Int8Embedding(Int8Layer):
    """Looks rows up, and gives what they mean in float."""

    kind = "embedding"
    inputs = 0

    def __init__(self, weights: Mapping[str, Int8Weight], floats: Tensors, ranges: Sequence[InputRange]) -> None:
        super().__init__(weights, floats, ranges)
        self.num_embeddings, self.embedding_dim = self.weights["weight"].values.shape

    @staticmethod
    def refusal(module: nn.Module) -> str | None:
        return "it has a max_norm, by which it changes while it is read" if module.max_norm is not None else None

    @staticmethod
    def parts(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        assert isinstance(module, nn.Embedding)
        return {"weight": module.weight.detach()}, {}

    @classmethod
    def build(
        cls, module: nn.Module, weights: Mapping[str, Int8Weight], floats: Tensors, ranges: Sequence[InputRange]
    ) -> Int8Layer:
        layer = cls(weights, floats, ranges)
        layer.padding_idx = module.padding_idx
        return layer

    @property
    def weight(self) -> torch.Tensor:
        """The whole table as it is meant, for whoever looks at it; made anew each time."""
        return self.weights["weight"].as_float

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        weight = self.weights["weight"]
        return F.embedding(indices, weight.values).float() * F.embedding(indices, weight.scales)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, int8"
