"""A convolution in int8, in one dimension or two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from paceline.quantize import kernels
from paceline.quantize.int8_layer import Int8Layer, Tensors
from paceline.quantize.int8_linear import parts_with_bias
from paceline.quantize.rounding import InputRange, Int8Weight


class Int8Convolution(Int8Layer):
    """A convolution over lines or images, which gives its result in the order of memory that it is given."""

    kind = "convolution"

    def __init__(
        self,
        weights: Mapping[str, Int8Weight],
        floats: Tensors,
        ranges: Sequence[InputRange],
        shape: tuple[list[int], list[int], list[int], int],
    ) -> None:
        super().__init__(weights, floats, ranges)
        self.shape, self.bias = shape, self.floats.get("bias")
        self._shape = shape  # as of an image
        weight = self.weights["weight"]
        self.lines = weight.values.dim() == 3  # a line is an image of one row
        if self.lines:
            weight = Int8Weight(weight.values.unsqueeze(2), weight.scales.unsqueeze(2))
            stride, padding, dilation, groups = shape
            self._shape = ([1, *stride], [0, *padding], [1, *dilation], groups)
        self._images = weight
        self._scales = weight.scales.flatten().contiguous()
        self._zeros = torch.zeros(len(self._scales), dtype=torch.int64)
        self._packed: kernels.Packed = None

    @staticmethod
    def refusal(module: nn.Module) -> str | None:
        module_: Any = module
        if module_.padding_mode != "zeros":
            return f"its padding_mode is {module_.padding_mode!r}"
        if _padding(module_) is None:
            return "its padding='same' is not the same on both sides"
        return None

    @staticmethod
    def parts(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return parts_with_bias(module)

    @classmethod
    def build(
        cls, module: nn.Module, weights: Mapping[str, Int8Weight], floats: Tensors, ranges: Sequence[InputRange]
    ) -> Int8Layer:
        given: Any = module
        padding = _padding(given)
        assert padding is not None
        return cls(weights, floats, ranges, (list(given.stride), padding, list(given.dilation), given.groups))

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it is meant, for whoever looks at it; made anew each time."""
        return self.weights["weight"].as_float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.lines:
            return self._convolved(x.unsqueeze(-2)).squeeze(-2)
        return self._convolved(x)

    def _convolved(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 3:
            return self._convolved(x.unsqueeze(0)).squeeze(0)
        if self.looks is not None or not x.numel():
            if self.looks is not None:
                self.looks[0].see(x)
            return F.conv2d(x, self._images.as_float, self.bias, *self._shape)
        (rounding,) = self.ranges
        if self._packed is None:
            self._packed = kernels.pack_convolution(self._images, rounding, x.shape, self._shape)
        found = kernels.convolution(x, rounding, self._packed, self._scales, self._zeros, self.bias, self._shape)
        return found.contiguous() if x.is_contiguous() else found  # what comes next may take a view of it

    def end_look(self, *, dynamic: bool) -> str | None:
        return super().end_look(dynamic=False)  # there is no kernel for the other

    def extra_repr(self) -> str:
        return f"{list(self.weights['weight'].values.shape)}, int8"


def _padding(module: Any) -> list[int] | None:
    """Returns the zeros on both sides of each dim; None if one side has more than the other."""
    if not isinstance(module.padding, str):
        return list(module.padding)
    if module.padding == "valid":
        return [0] * len(module.kernel_size)
    both = [dilation * (size - 1) for dilation, size in zip(module.dilation, module.kernel_size, strict=True)]
    return None if any(total % 2 for total in both) else [total // 2 for total in both]
