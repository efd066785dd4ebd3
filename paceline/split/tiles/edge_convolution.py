"""A convolution that keeps the size of its input, on a tile that stays where it is.

To put the tile and its halo together would be a copy of all activations, twice more in backward. But a convolution is
linear: that of the tile alone, with zeros around it, lacks only what the halo adds to the first and the last rows.
That is computed by itself, from strips a few rows high. Nothing large moves, and the halo travels meanwhile.

    tile ── convolution ────────────────────▶ rows of the output
    halo ── convolution of the strip ─▶ added to the first (last) of them
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from paceline.exchange.mailboxes import DeviceGroup


@dataclass(frozen=True)
class ConvolutionShape:
    """A convolution with strides of one: how far it reaches along the dim that is cut, and what torch is told."""

    dim: int
    reach: int
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def of_strip(self) -> tuple[int, ...]:
        """Returns the padding for a strip, which has its zeros along the dim that is cut already."""
        return tuple(0 if 2 + i == self.dim else pad for i, pad in enumerate(self.padding))


def convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: DeviceGroup, shape: ConvolutionShape
) -> torch.Tensor:
    """Returns the rows of this device, of a convolution over the tiles of the group."""
    return _Convolved.apply(x, weight, bias, group, shape)  # type: ignore[no-untyped-call, no-any-return]


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: DeviceGroup,
        shape: ConvolutionShape,
    ) -> torch.Tensor:
        for rank, first in _neighbours(group):
            group.peers.send(_edge(x, shape, first), rank)
        y = _run(x, weight, bias, shape, shape.padding)
        strips = []
        for rank, first in _neighbours(group):
            strips.append(_strip(group.peers.receive(rank), shape, first))
            _edge(y, shape, first).add_(_run(strips[-1], weight, None, shape, shape.of_strip))
        ctx.group, ctx.shape, ctx.bias = group, shape, None if bias is None else list(bias.shape)
        ctx.save_for_backward(x, weight, *strips)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, shape = ctx.group, ctx.shape
        x, weight, *strips = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        of_strips = []
        for (rank, first), strip in zip(_neighbours(group), strips, strict=True):
            part = _edge(dy, shape, first)
            d_strip, d_weight, _ = _backward(part, strip, weight, None, shape, shape.of_strip, wants_x, wants_weight)
            if wants_x:
                group.peers.send(_edge(d_strip, shape, first), rank)
            of_strips.append(d_weight)
        bias = ctx.bias if wants_bias else None
        dx, dw, db = _backward(dy, x, weight, bias, shape, shape.padding, wants_x, wants_weight)
        for d_weight in of_strips if wants_weight else ():
            dw += d_weight
        for rank, first in _neighbours(group) if wants_x else ():
            _edge(dx, shape, first).add_(group.peers.receive(rank))
        return dx, dw, db, None, None


def _neighbours(group: DeviceGroup) -> Iterator[tuple[int, bool]]:
    """Yields who has the rows before this device's first one, and after its last one; and which of both."""
    if group.index > 0:
        yield group.ranks[group.index - 1], True
    if group.index < group.count - 1:
        yield group.ranks[group.index + 1], False


def _edge(x: torch.Tensor, shape: ConvolutionShape, first: bool) -> torch.Tensor:
    """Returns the rows of a tile that see a neighbour's, and that a neighbour sees: the first, or the last."""
    return x.narrow(shape.dim, 0 if first else x.size(shape.dim) - shape.reach, shape.reach)


def _strip(halo: torch.Tensor, shape: ConvolutionShape, first: bool) -> torch.Tensor:
    """Returns a neighbour's rows, and zeros in the place of so many own ones as the rows at the edge look at."""
    size = list(halo.shape)
    size[shape.dim] *= 3
    strip = halo.new_zeros(size)
    _edge(strip, shape, first).copy_(halo)
    return strip


def _run(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: ConvolutionShape, padding: tuple[int, ...]
) -> torch.Tensor:
    ones = [1] * len(padding)
    return torch.convolution(x, weight, bias, ones, padding, shape.dilation, False, [0] * len(padding), shape.groups)


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: list[int] | None,
    shape: ConvolutionShape,
    padding: tuple[int, ...],
    wants_x: bool,
    wants_weight: bool,
) -> tuple[Any, Any, Any]:
    ones, zeros, wanted = [1] * len(padding), [0] * len(padding), [wants_x, wants_weight, bias is not None]
    found: tuple[Any, Any, Any] = torch.ops.aten.convolution_backward(
        dy, x, weight, bias, ones, padding, shape.dilation, False, zeros, shape.groups, wanted
    )
    return found
