"""A convolution of what one device has, in parts: forward, and each of the gradients by itself.

Of the gradients other devices wait for that of the input, to normalize theirs by sums over all, or because they have
lent some of its rows. Nobody waits for that of the weight, which takes as long: it is left for when this device would
wait for others (`optim/postponed.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from paceline.optim import direct_gradients
from paceline.split.once_differentiable import once_differentiable
from paceline.split.tiles.tile import Func


@dataclass(frozen=True)
class Convolution:
    """What torch is told of a convolution, but for its tensors."""

    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilations: tuple[int, ...]
    groups: int

    def run(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns what it makes of `x`."""
        zeros = [0] * len(self.strides)
        return torch.convolution(x, weight, bias, self.strides, self.padding, self.dilations, False, zeros, self.groups)

    def input_gradient(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of `x`, of which the values do not matter."""
        return self._backward(dy, x, weight, (True, False, False))[0]

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of `weight`, of which the values do not matter."""
        return self._backward(dy, x, weight, (False, True, False))[1]

    def bias_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the bias. Asked for it, torch would find that of the weight as well."""
        return dy.sum([dim for dim in range(dy.dim()) if dim != 1])

    def _backward(
        self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: tuple[bool, bool, bool]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        zeros = [0] * len(self.strides)
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten.convolution_backward(
            dy, x, weight, None, self.strides, self.padding, self.dilations, False, zeros, self.groups, wanted
        )
        return found


def convolved(
    func: Func, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: Convolution
) -> torch.Tensor:
    """Returns what `func`, torch's convolution, makes of `x`; the gradient of its weight may come later."""
    writer = direct_gradients.writer_of(weight)
    if writer is None:
        found: torch.Tensor = func(x, weight, bias, how.strides, how.padding, how.dilations, how.groups)
        return found
    return _Convolved.apply(x, weight, bias, how, writer)  # type: ignore[no-untyped-call, no-any-return]


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        how: Convolution,
        writer: direct_gradients.GradientWriter,
    ) -> torch.Tensor:
        ctx.how, ctx.writer = how, writer
        ctx.save_for_backward(x, weight)
        return how.run(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        how = ctx.how
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        dx = how.input_gradient(dy, x, weight) if wants_x else None
        dw = None
        if wants_weight:
            dw = direct_gradients.of_convolution(
                ctx.writer, lambda: how.weight_gradient(dy, x, weight), ctx.next_functions[1][0]
            )
        return dx, dw, how.bias_gradient(dy) if wants_bias else None, None, None
