"""A linear layer in int8; also the `Conv1D` of transformers, which is one with its matrix on its side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from paceline.quantize import kernels
from paceline.quantize.int8_layer import Int8Layer, Tensors
from paceline.quantize.rounding import InputRange, Int8Weight


class Int8Linear(Int8Layer):
    """`x @ weight.T + bias`."""

    kind = "linear"

    def __init__(self, weights: Mapping[str, Int8Weight], floats: Tensors, ranges: Sequence[InputRange]) -> None:
        super().__init__(weights, floats, ranges)
        self.matrix, self.bias = self.matrix_of(self.weights["weight"]), self.floats.get("bias")
        self.out_features, self.in_features = self.matrix.values.shape
        self._packed: kernels.Packed = None  # at the first call: attention has some that are never called

    @staticmethod
    def matrix_of(weight: Int8Weight) -> Int8Weight:
        """Returns the weight as out × in."""
        return weight

    @staticmethod
    def refusal(module: nn.Module) -> str | None:
        return None

    @staticmethod
    def parts(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return parts_with_bias(module)

    @classmethod
    def build(
        cls, module: nn.Module, weights: Mapping[str, Int8Weight], floats: Tensors, ranges: Sequence[InputRange]
    ) -> Int8Layer:
        return cls(weights, floats, ranges)

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it is meant, for whoever looks at it; made anew each time."""
        return self.weights["weight"].as_float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.looks is not None:
            self.looks[0].see(x)
            return F.linear(x, self.matrix.as_float, self.bias)
        if x.dim() == 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        if self._packed is None:
            self._packed = kernels.pack_matrix(self.matrix, self.bias)
        if self.ranges:
            return kernels.product(x, self.ranges[0], self._packed)
        return kernels.product_of_any(x, self._packed)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, int8"


class Int8Conv1D(Int8Linear):
    """`x @ weight + bias`, as transformers' GPT-2 has it."""

    kind = "conv1d of transformers"
    channel_dim = 1

    @staticmethod
    def matrix_of(weight: Int8Weight) -> Int8Weight:
        return weight.transposed


def parts_with_bias(module: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the weight of a module that has just that and perhaps a bias, and the bias."""
    return {"weight": module.weight.detach()}, {} if module.bias is None else {"bias": module.bias.detach()}


def is_transformers_conv1d(module: nn.Module) -> bool:
    """Whether it is that class, which need not be imported for it."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
