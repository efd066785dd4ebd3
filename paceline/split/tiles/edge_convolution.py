"""A convolution that keeps the size of its input, on a tile that stays where it is.

To put the tile and its halo together would be a copy of all activations, twice more in backward. But a convolution is
linear: that of the tile alone, with zeros around it, lacks only what the halo adds to the first and the last rows.
That is computed by itself, from the halo and the rows of the kernel that reach over the edge. Nothing large moves, and
the halo travels meanwhile.

    tile ── convolution ────────────────────▶ rows of the output
    halo ── convolution with a part of the kernel ─▶ added to the first (last) of them
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.exchange.mailboxes import DeviceGroup
from paceline.optim import direct_gradients
from paceline.split.once_differentiable import once_differentiable
from paceline.split.tiles.convolution import Convolution


@dataclass(frozen=True)
class Edges:
    """How far a convolution with strides of one reaches over the edges of a tile, along the dim that is cut: by so many
    rows of the image, with so many of the kernel, that see so many rows on this side as well."""

    dim: int
    reach: int
    kernel_rows: int
    rows_inside: int

    def of_strip(self, whole: Convolution) -> Convolution:
        """Returns the convolution of a strip, which is not padded along the dim that is cut."""
        padding = tuple(0 if 2 + i == self.dim else pad for i, pad in enumerate(whole.padding))
        return replace(whole, padding=padding)

    def of_image(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        """Returns the rows of a tile that see a neighbour's, and that a neighbour sees: the first, or the last."""
        return self._outer(x, self.reach, first)

    def of_kernel(self, weight: torch.Tensor, first: bool) -> torch.Tensor:
        """Returns the rows of the kernel that reach over the first, or the last, edge."""
        return self._outer(weight, self.kernel_rows, first)

    def _outer(self, x: torch.Tensor, rows: int, first: bool) -> torch.Tensor:
        return x.narrow(self.dim, 0 if first else x.size(self.dim) - rows, rows)

    def strip(self, halo: torch.Tensor, first: bool) -> torch.Tensor:
        """Returns a neighbour's rows, and zeros in the place of own ones that the same part of the kernel sees."""
        if not self.rows_inside:  # a kernel of three rows
            return halo
        size = list(halo.shape)
        size[self.dim] += self.rows_inside
        strip = halo.new_zeros(size)
        self.of_image(strip, first).copy_(halo)
        return strip


def convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    how: Convolution,
    edges: Edges,
    group: DeviceGroup,
) -> torch.Tensor:
    """Returns the rows of this device, of a convolution over the tiles of the group."""
    writer = direct_gradients.writer_of(weight)
    return _Convolved.apply(x, weight, bias, how, edges, group, writer)  # type: ignore[no-untyped-call, no-any-return]


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        how: Convolution,
        edges: Edges,
        group: DeviceGroup,
        writer: direct_gradients.GradientWriter | None,
    ) -> torch.Tensor:
        for rank, first in _neighbours(group):
            group.peers.send(edges.of_image(x, first), rank)
        y = how.run(x, weight, bias)
        strips = []
        for rank, first in _neighbours(group):
            strips.append(edges.strip(group.peers.receive(rank), first))
            found = edges.of_strip(how).run(strips[-1], edges.of_kernel(weight, first), None)
            edges.of_image(y, first).add_(found)
        ctx.how, ctx.edges, ctx.group, ctx.writer = how, edges, group, writer
        ctx.save_for_backward(x, weight, *strips)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        how, edges, group = ctx.how, ctx.edges, ctx.group
        x, weight, *strips = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        beside, beyond = edges.of_strip(how), list(zip(_neighbours(group), strips, strict=True))
        dx = dw = None
        if wants_x:
            for (rank, first), strip in beyond:
                kernel = edges.of_kernel(weight, first)
                d_strip = beside.input_gradient(edges.of_image(dy, first), strip, kernel)
                group.peers.send(edges.of_image(d_strip, first), rank)
            dx = how.input_gradient(dy, x, weight)

        def find() -> torch.Tensor:
            found: torch.Tensor = how.weight_gradient(dy, x, weight)
            for (_, first), strip in beyond:
                kernel = edges.of_kernel(weight, first)
                edges.of_kernel(found, first).add_(beside.weight_gradient(edges.of_image(dy, first), strip, kernel))
            return found

        if wants_weight:
            dw = direct_gradients.of_convolution(ctx.writer, find, ctx.next_functions[1][0])
        if dx is not None:
            for rank, first in _neighbours(group):
                edges.of_image(dx, first).add_(group.peers.receive(rank))
        return dx, dw, how.bias_gradient(dy) if wants_bias else None, None, None, None, None


def _neighbours(group: DeviceGroup) -> Iterator[tuple[int, bool]]:
    """Yields who has the rows before this device's first one, and after its last one; and which of both."""
    if group.index > 0:
        yield group.ranks[group.index - 1], True
    if group.index < group.count - 1:
        yield group.ranks[group.index + 1], False
