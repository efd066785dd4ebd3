"""Upsampling and downsampling to another number of rows: nearest, linear in every direction, and channels to pixels.

Along what is cut, the rows that are mixed are picked by number, as torch works them out for the whole; along the other
dims torch's own op does it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from paceline.split.tiles.halo_exchange import Widened
from paceline.split.tiles.needed_rows import needed_rows, ranges
from paceline.split.tiles.samples import BY_SAMPLE
from paceline.split.tiles.tile import Func, Tile

if TYPE_CHECKING:
    from paceline.split.tiles.tiled_forward import TiledForward

LINEAR = ("linear", "bilinear", "trilinear")
NEAREST = ("nearest", "nearest-exact")


class Picked:
    """The two input rows that every row of the output is mixed from, and how much of the second."""

    def __init__(
        self, length: int, outputs: int, factor: float | None, mode: str, corners: bool, exact: torch.dtype
    ) -> None:
        rows = torch.arange(outputs, dtype=exact)
        step = torch.tensor(1 / factor if factor else length / outputs, dtype=exact)
        if mode in LINEAR:
            if corners:
                step = torch.tensor((length - 1) / (outputs - 1) if outputs > 1 else 0.0, dtype=exact)
                at = rows * step
            else:
                at = ((rows + 0.5) * step - 0.5).clamp_(min=0)
        else:
            at = (rows + 0.5) * step if mode == "nearest-exact" else rows * step
        self.first = at.floor().long().clamp_(max=length - 1)
        self.second = (self.first + 1).clamp_(max=length - 1) if mode in LINEAR else self.first
        self.share = (at - self.first).clamp_(0, 1) if mode in LINEAR else None

    def window(self, start: int, stop: int) -> tuple[int, int]:
        """Returns which input rows these output rows need."""
        return int(self.first[start]), int(self.second[stop - 1]) + 1

    def take(self, x: torch.Tensor, dim: int, origin: int, start: int, stop: int) -> torch.Tensor:
        """Returns these output rows, from input rows of which the first is row `origin`."""
        first = x.index_select(dim, self.first[start:stop] - origin)
        if self.share is None:
            return first
        second = x.index_select(dim, self.second[start:stop] - origin)
        share = self.share[start:stop].to(x.dtype).view([-1 if d == dim else 1 for d in range(x.dim())])
        return first.lerp(second, share.expand_as(first))


def interpolate(
    tiled: TiledForward,
    func: Func,
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """Resizes images, to a size or by a factor."""
    if not isinstance(input, Tile) or mode not in (*LINEAR, *NEAREST) or antialias:
        return NotImplemented
    by_sample = input.dims == BY_SAMPLE and input.dim() > 2
    if min(input.dims) < 2 and not by_sample:
        return NotImplemented
    spatial = input.dim() - 2
    factors: list[float | None] = [None] * spatial
    if size is not None:
        outputs = list(size) if isinstance(size, (tuple, list)) else [size] * spatial
    else:
        given = list(scale_factor) if isinstance(scale_factor, (tuple, list)) else [scale_factor] * spatial
        outputs = [math.floor(n * f) for n, f in zip(input.shape[2:], given, strict=True)]
        if not recompute_scale_factor:
            factors = given
    axes, lengths = tiled.grid.axes, input.lengths
    cut_dims = [2 + axis.which for axis in axes] if by_sample else input.dims
    if any(outputs[dim - 2] < axis.parts for axis, dim in zip(axes, cut_dims, strict=True)):
        return NotImplemented
    if by_sample:
        return input.like(func(input.local, size, scale_factor, mode, align_corners, recompute_scale_factor))
    precision = torch.float64 if input.dtype == torch.float64 and mode in LINEAR else torch.float32
    picked = [
        Picked(n, outputs[dim - 2], factors[dim - 2], mode, bool(align_corners), precision)
        for n, dim in zip(lengths, input.dims, strict=True)
    ]
    needed = [
        needed_rows(ranges(n, axis.parts), [of.window(*own) for own in ranges(outputs[dim - 2], axis.parts)])
        for n, axis, dim, of in zip(lengths, axes, input.dims, picked, strict=True)
    ]
    x = Widened(input, needed).x
    for axis, dim, of, of_axis in zip(axes, input.dims, picked, needed, strict=True):
        x = of.take(x, dim, of_axis.need[axis.index][0], *axis.own(outputs[dim - 2]))
    others = [i for i in range(spatial) if 2 + i not in input.dims]
    if others:
        if size is not None or recompute_scale_factor:
            how: dict[str, Any] = {"size": [outputs[i] if i in others else x.size(2 + i) for i in range(spatial)]}
        else:
            how = {"scale_factor": [factors[i] if i in others else 1.0 for i in range(spatial)]}
        x = F.interpolate(x, mode=mode, align_corners=align_corners, **how)
    return Tile(x, input.dims, tuple(outputs[dim - 2] for dim in input.dims), tiled)


def pixel_shuffle(tiled: TiledForward, func: Func, input: Any, upscale_factor: int) -> Any:
    """Turns channels to pixels: a row becomes several, and where tiles meet one of the rows may be the neighbour's."""
    if not isinstance(input, Tile):
        return NotImplemented
    if input.dims == BY_SAMPLE and input.dim() > 3:
        return input.like(func(input.local, upscale_factor))
    if min(input.dims) < 2:
        return NotImplemented
    factor, axes = upscale_factor, tiled.grid.axes
    outputs = tuple(n * factor for n in input.lengths)
    needed = [
        needed_rows(
            ranges(n, axis.parts), [(start // factor, -(-stop // factor)) for start, stop in ranges(m, axis.parts)]
        )
        for n, m, axis in zip(input.lengths, outputs, axes, strict=True)
    ]
    x = func(Widened(input, needed).x, factor)
    for axis, dim, m, of_axis in zip(axes, input.dims, outputs, needed, strict=True):
        start, stop = axis.own(m)
        x = x.narrow(dim, start - of_axis.need[axis.index][0] * factor, stop - start)
    return Tile(x, input.dims, outputs, tiled)
