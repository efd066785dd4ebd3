"""Max pooling of what one device has, with the channels of an image side by side meanwhile.

Where channels are planes torch's kernel looks at one number at a time, and takes as long as a large convolution. Where
they lie side by side it looks at a vector of them, and takes a third with many channels, the way there and back
included: there a few images at a time, in the cache. Which number was the highest is told in the same way, so backward
is torch's own; it is given numbers that nobody reads, of the size of the input, which need not be kept: that was put
together from the tile and its halo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from paceline.memory.channels_last import channels_are_last
from paceline.optim.image_blocks import image_blocks
from paceline.split.once_differentiable import once_differentiable
from paceline.split.tiles.tile import Func

LEAST_CHANNELS = 32  # of fewer the way there and back takes what is gained


@dataclass(frozen=True)
class MaxPool:
    """What torch is told of a max pooling, but for its tensor."""

    kernels: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilations: tuple[int, ...]
    ceil: bool

    def run(self, func: Func, x: torch.Tensor) -> torch.Tensor:
        """Returns what `func`, torch's pooling, makes of `x`."""
        images = x.dim() == 4 and x.device.type == "cpu" and x.is_floating_point() and x.numel() > 0
        planes = x.is_contiguous() and x.size(1) >= LEAST_CHANNELS
        if images and (planes or channels_are_last(x)):
            return _SideBySide.apply(x, self)  # type: ignore[no-untyped-call, no-any-return]
        found: torch.Tensor = func(x, self.kernels, self.strides, self.padding, self.dilations, self.ceil)
        return found

    def highest(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the highest numbers, and where they are."""
        found: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten.max_pool2d_with_indices(
            x, self.kernels, self.strides, self.padding, self.dilations, self.ceil
        )
        return found

    def gradient(self, dy: torch.Tensor, x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of `x`, of which the values do not matter."""
        found: torch.Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
            dy, x, self.kernels, self.strides, self.padding, self.dilations, self.ceil, where
        )
        return found


class _SideBySide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, how: MaxPool) -> torch.Tensor:
        ctx.how, ctx.last = how, channels_are_last(x)
        if ctx.last:
            highest, where = how.highest(x)
        else:
            blocks = [how.highest(x[block].contiguous(memory_format=torch.channels_last)) for block in image_blocks(x)]
            highest, where = (torch.cat([found.contiguous() for found in each]) for each in zip(*blocks, strict=True))
        ctx.shape = x.shape
        ctx.save_for_backward(where)
        return highest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (where,) = ctx.saved_tensors
        lie = torch.channels_last if ctx.last else torch.contiguous_format
        unread = torch.empty(ctx.shape, dtype=dy.dtype, device=dy.device, memory_format=lie)
        return ctx.how.gradient(dy.contiguous(memory_format=lie), unread, where), None
