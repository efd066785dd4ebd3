"""How images lie in memory: as planes, a channel after the other, or with the channels of a pixel side by side.

planes          r r r r  g g g g  b b b b
channels last   r g b  r g b  r g b  r g b
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def channels_are_last(x: torch.Tensor) -> bool:
    """Returns whether the channels of a pixel lie side by side, also in some rows of such an image.

    >>> image = torch.zeros(2, 3, 4, 5)
    >>> channels_are_last(image), channels_are_last(image.contiguous(memory_format=torch.channels_last)[:, :, :1])
    (False, True)
    """
    return x.dim() == 4 and x.size(1) > 1 and x.stride(1) == 1 and not x.is_contiguous()


def laid_like(x: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """Returns `piece` as x lies: one that lies otherwise would make the whole lose it."""
    return piece.contiguous(memory_format=torch.channels_last) if channels_are_last(x) else piece


def in_order(x: torch.Tensor) -> torch.Tensor:
    """Returns a view of `x` with its dims in the order in which they lie."""
    return x.permute(0, 2, 3, 1) if channels_are_last(x) else x


def empty_in_order(shape: Sequence[int], dtype: torch.dtype, last: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a tensor of that shape, with its channels last or not, and all its elements as they lie."""
    if not last:
        planes = torch.empty(list(shape), dtype=dtype)
        return planes, planes.view(-1)
    samples, channels, rows, columns = shape
    pixels = torch.empty(samples, rows, columns, channels, dtype=dtype)
    return pixels.permute(0, 3, 1, 2), pixels.view(-1)
