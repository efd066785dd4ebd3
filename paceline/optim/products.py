"""Products of large matrices, by the library of torch's that takes less time for them on this processor.

Linear layers multiply by MKL, which uses its widest instructions on Intel's processors alone. oneDNN, by which torch
convolves, uses those that there are: on AMD's with AVX-512 such a product takes about half the time. Values differ by
rounding, so which of the two it is depends on the processor, sizes and types, and on nothing that is measured: the same
run makes the same bits.

Autograd knows nothing of it: whoever calls these functions wants no gradient, or finds it himself
(`direct_gradients.py`). Small products, and matrices that do not lie in a row, are torch's own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from paceline import machine, torch_private

LEAST_ELEMENTS = 1 << 18  # of the larger matrix: of a smaller one the call takes what is gained
LEAST_ROWS = 8  # of the other: fewer are hardly more than to read the larger one
_BLOCK_BYTES = 1 << 21  # of a product that is to be in a given place: it is still in the cache when it is copied there


@cache
def _multiply() -> Any:
    """Returns oneDNN's operator, (x, weight, bias) → x @ weightᵀ + bias; None where MKL is as quick."""
    return torch_private.linear_of_onednn() if machine.has_wide_instructions_of_amd() else None


def suit(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether rows of x times a large matrix, or times that transposed, are oneDNN's."""
    return (
        weight.dim() == 2
        and weight.numel() >= LEAST_ELEMENTS
        and x.dim() >= 2
        and x.numel() >= LEAST_ROWS * x.size(-1)
        and _are_plain(x, weight)
        and x.is_contiguous()
        and (weight.is_contiguous() or weight.t().is_contiguous())
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plain: Any = F.linear) -> torch.Tensor:
    """Returns x @ weightᵀ + bias; `plain` is torch's own."""
    fits = bias is None or (bias.shape == weight.shape[:1] and bias.dtype == torch.float32)
    if torch.is_grad_enabled() or not fits or not suit(x, weight) or x.size(-1) != weight.size(1):
        found: torch.Tensor = plain(x, weight, bias)
        return found
    return _by_onednn(x, weight, bias)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns x @ weight."""
    if torch.is_grad_enabled() or not suit(x, weight) or x.size(-1) != weight.size(0):
        return x @ weight
    return _by_onednn(x, weight.t(), None)


def gradient(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns one @ other, as the gradient of a weight: rows of both are summed over, and `one` is transposed."""
    if torch.is_grad_enabled() or not _suit_gradient(one, other):
        return one @ other
    return _by_onednn(one, other.t(), None)


def add_gradient(place: torch.Tensor, one: torch.Tensor, other: torch.Tensor, *, replace: bool) -> None:
    """Adds that to what is in `place`, or has it replace that."""
    if torch.is_grad_enabled() or place.dtype != torch.float32 or not _suit_gradient(one, other):
        if replace:
            torch.mm(one, other, out=place)
        else:
            place.addmm_(one, other)
        return
    rows = max(1, _BLOCK_BYTES // (other.size(1) * other.element_size()))
    for start in range(0, place.size(0), rows):
        block, found = place[start : start + rows], _by_onednn(one[start : start + rows], other.t(), None)
        if replace:
            block.copy_(found)
        else:
            block.add_(found)


def _suit_gradient(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dim() == other.dim() == 2
        and one.size(0) * other.size(1) >= LEAST_ELEMENTS
        and one.size(1) == len(other) >= LEAST_ROWS
        and _are_plain(one, other)
        and one.t().is_contiguous()
        and other.is_contiguous()
    )


def _are_plain(*matrices: torch.Tensor) -> bool:
    """Returns whether these are just float32 in the host's memory, and nobody follows what becomes of them."""
    return (
        _multiply() is not None
        and all(type(matrix) in (torch.Tensor, torch.nn.Parameter) for matrix in matrices)
        and all(matrix.dtype == torch.float32 and matrix.device.type == "cpu" for matrix in matrices)
        and not torch.is_autocast_enabled("cpu")
        and not torch_private.inside_forward_derivative()
        and not any(torch_private.is_batched(matrix) for matrix in matrices)
    )


def _by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    found: torch.Tensor = _multiply()(x, weight, bias, "none", [], "")
    return found
