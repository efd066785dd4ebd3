"""Products of few rows with one matrix, many times: the matrix is packed for them once.

torch's own product packs the matrix in every call, which for the few rows of a time step costs as much as a quarter of
the product. oneDNN keeps a packed one; where it does not serve (another type than fp32, a build without it) torch does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline import torch_private

Tensor = torch.Tensor


class PackedMatrix:
    """A matrix [out, in] to multiply rows with, as `F.linear` does."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        """`rows` is about how many there will be at a time."""
        self._weight = weight
        serves = rows and weight.dtype is torch.float32 and weight.device.type == "cpu" and torch_private.can_pack()
        self._packed = torch_private.pack_matrix(weight.contiguous(), rows) if serves else None

    def times(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Returns the product of `x` with it."""
        if self._packed is None:
            return F.linear(x, self._weight, bias)
        found: Tensor = torch_private.packed_product(x, self._packed, bias, "none", [], "")
        return found

    def times_plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Returns the product, with `other` added to it."""
        if self._packed is None:
            return torch.addmm(other, x, self._weight.t())
        found: Tensor = torch_private.packed_product_plus(x, other, self._packed, None, "add")
        return found
