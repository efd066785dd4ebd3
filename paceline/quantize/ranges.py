"""What comes into a layer: looked at while a model answers some samples, to find how its inputs are rounded best."""

from __future__ import annotations

import math

import torch

from paceline.quantize.rounding import InputRange, best_range

MOST_KEPT = 1 << 17  # numbers of one input that are kept
A_CALL = 1 << 13  # of one call


class InputLook:
    """The numbers that have come into one place of a layer: how far they reach, and some of them."""

    def __init__(self) -> None:
        self.low, self.high = math.inf, -math.inf
        self._some: list[torch.Tensor] = []
        self._kept = 0

    def see(self, x: torch.Tensor) -> None:
        """Takes the numbers of one call into account."""
        if not x.numel():
            return
        low, high = torch.aminmax(x)
        self.low, self.high = min(self.low, float(low)), max(self.high, float(high))
        if self._kept < MOST_KEPT:
            flat = x.detach().flatten()
            some = flat[:: -(-len(flat) // A_CALL)].float().clone()
            self._some.append(some)
            self._kept += len(some)

    @property
    def is_finite(self) -> bool:
        """Whether there were numbers, and all of them were finite."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def found(self) -> InputRange:
        """Returns how they are rounded best."""
        return best_range(self.low, self.high, torch.cat(self._some))
