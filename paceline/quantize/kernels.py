"""What computes in int8 here: operators that torch has for its own quantized models.

Measured with one thread, on widths from 512 to 4096 and 1 to 64 rows: fbgemm's product of packed weights is up to 6
times as fast as float32 on a processor with AVX2 alone, and never much slower; oneDNN's is slower than float32 for one
row; `_int_mm` and `_weight_int8pack_mm` have no fast path there at all. Of convolutions oneDNN's is about as fast as
fbgemm's, and leaves its result in float32.

fbgemm packs what torch calls a quantized tensor, a kind that it means to give up. Where a torch or a processor has none
of this, `can_compute` says so, and a model is loaded with the same weights in float32.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from paceline.quantize.rounding import InputRange, Int8Weight
from paceline.torch_private import make_int8_matrix

Packed = Any
"""Weights as a kernel wants them."""


@functools.cache
def can_compute() -> bool:
    """Whether this torch, on this processor, computes products of int8 as they should be."""
    try:
        weight = Int8Weight(torch.tensor([[127, -127], [3, 0]], dtype=torch.int8), torch.tensor([[1.0], [0.5]]))
        packed = pack_matrix(weight, torch.tensor([0.25, 0.0]))
        found = product(torch.tensor([[1.0, 0.0], [63.0, -64.0]]), InputRange(1.0, 64), packed)
        return found.tolist() == [[127.25, 1.5], [127.0 * 127 + 0.25, 94.5]]
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def pack_matrix(weight: Int8Weight, bias: torch.Tensor | None) -> Packed:
    """Returns a matrix, out × in, and what is added to its product."""
    channels = len(weight.values)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        tensor = make_int8_matrix(
            weight.values, weight.scales.flatten().double(), torch.zeros(channels, dtype=torch.int64), 0
        )
        return torch.ops.quantized.linear_prepack(tensor, bias)


def product(x: torch.Tensor, rounding: InputRange, packed: Packed) -> torch.Tensor:
    """Returns the product of `x`, as it is rounded, and a packed matrix, in float32."""
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(x, rounding.step, rounding.zero, packed)  # type: ignore[no-any-return]


def product_of_any(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Returns the same with a rounding that follows from the numbers in `x`."""
    return torch.ops.quantized.linear_dynamic(x, packed, True)  # type: ignore[no-any-return]


def pack_convolution(
    weight: Int8Weight, rounding: InputRange, example: Sequence[int], shape: tuple[list[int], list[int], list[int], int]
) -> Packed:
    """Returns the weights of a convolution. `shape`: stride, padding, dilation, groups; `example`: what it is given."""
    return torch.ops.onednn.qconv_prepack(
        weight.values, weight.scales.flatten(), rounding.step, rounding.zero, *shape, list(example)
    )


def convolution(
    x: torch.Tensor,
    rounding: InputRange,
    packed: Packed,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None,
    shape: tuple[list[int], list[int], list[int], int],
) -> torch.Tensor:
    """Returns the convolution of `x`, as it is rounded, in float32."""
    return torch.ops.onednn.qconv2d_pointwise(  # type: ignore[no-any-return]
        rounding.rounded(x), rounding.step, rounding.zero, packed, scales, zeros, bias, *shape, 1.0, 0, torch.float32,
        "none", [], "",
    )  # fmt: skip


def pack_cell(inputs: Int8Weight, state: Int8Weight, biases: tuple[torch.Tensor, torch.Tensor]) -> Packed:
    """Returns one direction of one recurrent layer."""
    return torch.ops.quantized.make_quantized_cell_params_dynamic(
        pack_matrix(inputs, biases[0]), pack_matrix(state, biases[1]), *biases, True
    )
