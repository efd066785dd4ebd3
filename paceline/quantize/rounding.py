"""The arithmetic of int8: what a tensor is rounded to, and what that means.

    weights    w ≈ q · scale          q from -127 to 127, a scale a row (output channel); 0 is exact
    inputs     x ≈ (u - zero) · step  u from 0 to 127, one step and zero a tensor; 0 is exact

Inputs have 7 bits, not 8: processors without VNNI add up two products in 16 bits, which 2 · 127 · 127 fits and
2 · 255 · 127 does not. So sums of products are exact on each of them.
"""

from __future__ import annotations

import msgspec
import torch

MOST = 127  # of both
LEAST_STEP = torch.finfo(torch.float32).tiny  # of a smaller one there is no reciprocal: all numbers are as good as 0
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)  # of the widest range that are tried


class InputRange(msgspec.Struct, frozen=True):
    """How the numbers that come into a layer are rounded."""

    step: float
    zero: int

    @property
    def low(self) -> float:
        return -self.zero * self.step

    @property
    def high(self) -> float:
        return (MOST - self.zero) * self.step

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x` in whole numbers.

        >>> InputRange(0.5, 10).rounded(torch.tensor([-9.0, 0.0, 0.6, 100.0])).tolist()
        [0, 10, 11, 127]
        """
        return x.mul(1 / self.step).add_(self.zero).round_().clamp_(0, MOST).to(torch.uint8)

    def back(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns what the whole numbers mean."""
        return (whole.float() - self.zero) * self.step


def range_between(low: float, high: float) -> InputRange:
    """Returns the rounding of numbers from `low` to `high`, in which 0 is exact.

    >>> range_between(-1.0, 1.0).zero, range_between(5.0, 254.0)
    (64, InputRange(step=2.0, zero=0))
    """
    low, high = min(low, 0.0), max(high, 0.0)
    step = (high - low) / MOST
    if step < LEAST_STEP:
        step = 1.0
    return InputRange(step, round(-low / step))


def best_range(low: float, high: float, some: torch.Tensor) -> InputRange:
    """Returns the rounding by which `some` of the numbers between `low` and `high` lose least: a few large ones may be
    cut off for a finer step of all others."""
    tried = [range_between(low * share, high * share) for share in SHARES]
    lost = [float((one.back(one.rounded(some)) - some).square().sum()) for one in tried]
    return tried[lost.index(min(lost))]


class Int8Weight(msgspec.Struct, frozen=True):
    """A weight in int8: `values * scales`, where the scales have the weight's shape but for 1 in all dims of a channel.

    So whoever reads a file gets the weight back by that product, whatever layer it is of.
    """

    values: torch.Tensor
    scales: torch.Tensor

    @property
    def as_float(self) -> torch.Tensor:
        return self.values.float() * self.scales

    @property
    def transposed(self) -> Int8Weight:
        return Int8Weight(self.values.t().contiguous(), self.scales.t().contiguous())

    def rows(self, start: int, stop: int) -> Int8Weight:
        return Int8Weight(self.values[start:stop], self.scales[start:stop])


def round_weight(weight: torch.Tensor, channel_dim: int = 0) -> Int8Weight:
    """Returns the weight in int8, with a scale for each of its channels.

    >>> found = round_weight(torch.tensor([[1.27, -0.02], [0.0, 0.0]]))
    >>> found.values.tolist(), found.scales.shape
    ([[127, -2], [0, 0]], torch.Size([2, 1]))
    """
    weight = weight.detach()
    within = [dim for dim in range(weight.dim()) if dim != channel_dim]
    scales = weight.abs().amax(within, keepdim=True) / MOST
    scales = torch.where(scales == 0, 1.0, scales)
    return Int8Weight((weight / scales).round_().clamp_(-MOST, MOST).to(torch.int8), scales)
