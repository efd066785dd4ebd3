"""Ops that look at a neighbourhood: convolution, transposed convolution, pooling, padding.

Each works out how many rows it gives, from that which rows this device needs, fetches them with the padding at the
borders, and runs torch's own op without padding along what is cut. Along the other dims torch pads as ever.

A tensor that is not cut yet is cut here: this is how an image comes to be tiles. The rows that are needed, halo
included, are then just taken from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from paceline.memory.channels_last import channels_are_last
from paceline.split.tiles import edge_convolution
from paceline.split.tiles.convolution import Convolution, convolved
from paceline.split.tiles.halo_exchange import Widened
from paceline.split.tiles.max_pool import MaxPool
from paceline.split.tiles.needed_rows import NeededRows, Range, each, output_rows, paddings, ranges, sliding, spreading
from paceline.split.tiles.samples import BY_SAMPLE, dealt_out, few_rows, moved
from paceline.split.tiles.side_by_side import laid_out_by_its_user
from paceline.split.tiles.tile import Func, Tile

if TYPE_CHECKING:
    from paceline.split.tiles.tiled_forward import TiledForward

Lengths = Sequence[int]

# Products that take as long as to put an element of a tile together with its halo, forward and backward. Measured on
# the convolutions of resnet18: strips pay in its first layers, with many rows and few channels.
WORK_OF_A_COPY = 32.0


class Neighbourhood:
    """One such op on one tensor: whether it is cut, and the rows it needs."""

    def __init__(self, tiled: TiledForward, func: Func, x: torch.Tensor, spatial: int, outputs: Lengths) -> None:
        self.tiled, self.x, self.axes = tiled, x, tiled.grid.axes
        self.dims = tuple(2 + axis.which for axis in self.axes)
        self.outputs = tuple(outputs)
        self.possible = self._possible(func, spatial)

    def _possible(self, func: Func, spatial: int) -> bool:
        """Returns whether it can be cut; where not, the reason is noted."""
        shape = self.x.shape
        if len(shape) != spatial + 2:
            return self._no(func, f"it is given {len(shape)} dims, give images in batches")
        for axis in self.axes:
            if axis.which >= spatial:
                return self._no(func, "it has one spatial dim, which is cut by rows: give --tiles N")
            rows, what = shape[2 + axis.which], ("rows", "columns")[axis.which]
            if min(rows, self.outputs[axis.which]) < axis.parts:
                return self._no(
                    func,
                    f"it makes {self.outputs[axis.which]} {what} of {rows}, too few for {axis.parts} devices: "
                    f"give at most that many tiles",
                )
        if isinstance(self.x, Tile) and self.x.dims not in (self.dims, BY_SAMPLE):
            self.x = self.tiled.whole(self.x, func)
        return True

    def by_sample(self, needed: Sequence[NeededRows]) -> Tile | None:
        """Returns the images by sample, if they lie so, or should from here on; None if not. `needed`: of rows."""
        x, axis = self.x, self.axes[0]
        if len(self.axes) > 1:
            return None
        if isinstance(x, Tile) and x.dims == BY_SAMPLE:
            return x
        if not few_rows(x, axis.parts, needed[0], self.outputs[axis.which]):
            return None
        if isinstance(x, Tile):
            self.x = found = moved(x, 0)
        else:
            self.looks_at_whole(x)
            self.x = found = dealt_out(x, self.tiled)
        return found

    def _no(self, func: Func, why: str) -> bool:
        self.tiled.cannot_cut(func, why)
        return False

    def needed(self, make: Callable[[int, int, int, int], NeededRows]) -> list[NeededRows]:
        """Returns the rows by axis, from `make(which spatial dim, input length, output length, parts)`."""
        return [
            make(axis.which, self.x.shape[2 + axis.which], self.outputs[axis.which], axis.parts) for axis in self.axes
        ]

    def run(self, needed: list[NeededRows], op: Callable[[torch.Tensor], torch.Tensor], value: float = 0.0) -> Tile:
        """Returns what `op` makes of the rows that are needed, as a tile. `value` is what padding is filled with."""
        if isinstance(self.x, Tile):
            widened = Widened(self.x, needed, value)
            with widened.kept_small():
                local = op(widened.x)
        else:
            x = self.x
            self.looks_at_whole(x)
            for axis, dim, of_axis in zip(self.axes, self.dims, needed, strict=True):
                start, stop = of_axis.need[axis.index]
                pads = (of_axis.before[axis.index], of_axis.after[axis.index])
                x = pad_one(x.narrow(dim, start, stop - start), dim, pads, value)
            local = op(x)
        lengths = tuple(self.outputs[axis.which] for axis in self.axes)
        return Tile(local, self.dims, lengths, self.tiled)

    def looks_at_whole(self, x: torch.Tensor) -> None:
        """Notes in the dry run what there is to know of an image that is cut here."""
        if self.tiled.is_dry_run:
            self.tiled.dry_run.cuts_whole(x.numel())
        if laid_out_by_its_user(x):
            self.tiled.stay_as_they_lie()

    def on_whole(self, func: Func, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Does it on all devices alike, because it cannot be cut."""
        x = self.tiled.whole(self.x, func) if isinstance(self.x, Tile) else self.x
        whole: torch.Tensor = func(x, *args, **kwargs)
        return whole


def pad_one(x: torch.Tensor, dim: int, pads: Range, value: float = 0.0) -> torch.Tensor:
    """Returns `x` with rows of `value` before and after, along one dim."""
    if not any(pads):
        return x
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + list(pads), value=value)


# ── convolutions ─────────────────────────────────────────────────────────────────────────────────────────────


def convolve(
    tiled: TiledForward,
    func: Func,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Convolves: on the tile as it lies if the size stays, and else on the rows that are needed."""
    spatial = weight.dim() - 2
    kernels = tuple(weight.shape[2:])
    strides, dilations = each(stride, spatial), each(dilation, spatial)
    pads = paddings(padding, kernels, dilations)
    lengths = input.shape[-spatial:]
    outputs = [output_rows(*one) for one in zip(lengths, kernels, strides, pads, dilations, strict=True)]
    cut = Neighbourhood(tiled, func, input, spatial, outputs)
    if not cut.possible:
        return cut.on_whole(func, weight, bias, stride, padding, dilation, groups)

    if channels_are_last(weight):  # by which torch would lay out what comes
        tiled.stay_as_they_lie()

    def lying(x: torch.Tensor) -> torch.Tensor:
        return tiled.side_by_side.for_convolution(x, input.numel() // tiled.grid.everyone.count, weight)

    def op(x: torch.Tensor, pads: Sequence[Range]) -> torch.Tensor:
        inner = tuple(min(pair) for pair in pads)
        for i, (low, high) in enumerate(pads):
            x = pad_one(x, 2 + i, (low - inner[i], high - inner[i]))  # "same" with an even kernel
        return convolved(func, lying(x), weight, bias, Convolution(strides, inner, dilations, groups))

    needed = cut.needed(lambda i, n, m, parts: sliding(n, m, parts, kernels[i], strides[i], pads[i][0], dilations[i]))
    if (x := cut.by_sample(needed)) is not None:
        return x.like(op(x.local, pads))
    edges = _keeping_size(cut, kernels, strides, pads, dilations, weight.numel() / input.shape[1])
    if edges is not None:
        assert isinstance(cut.x, Tile)
        how = Convolution(strides, tuple(low for low, _ in pads), dilations, groups)
        group = cut.axes[0].group
        return cut.x.like(edge_convolution.convolved(lying(cut.x.local), weight, bias, how, edges, group))
    return cut.run(needed, lambda x: op(x, _uncut(cut, pads)))


def _keeping_size(
    cut: Neighbourhood, kernels: Lengths, strides: Lengths, pads: Sequence[Range], dilations: Lengths, work: float
) -> edge_convolution.Edges | None:
    """Returns where a convolution reaches over the edges of a tile, if it is to be done on it as it lies: it gives as
    many rows as there are, and the `work` (products for an element of the input) on strips of them is less than that
    of copying the tile."""
    x = cut.x
    if not isinstance(x, Tile) or len(cut.axes) > 1 or torch.is_autocast_enabled(x.device.type):
        return None
    (axis,), (dim,) = cut.axes, cut.dims
    reach = pads[axis.which][0]
    same_size = cut.outputs[axis.which] == x.shape[dim] and set(strides) == {1}
    fewest = min(stop - start for start, stop in ranges(x.shape[dim], axis.parts))
    if not same_size or not 0 < reach <= fewest or any(low != high for low, high in pads):
        return None
    kernel_rows = kernels[axis.which] // 2
    if work * reach / fewest > WORK_OF_A_COPY:
        return None
    return edge_convolution.Edges(dim, reach, kernel_rows, (kernel_rows - 1) * dilations[axis.which])


def _uncut(cut: Neighbourhood, pads: Sequence[Range]) -> list[Range]:
    """Returns the padding that is left to torch: along the dims that are cut it is there already."""
    return [(0, 0) if 2 + i in cut.dims else pair for i, pair in enumerate(pads)]


def transposed(
    tiled: TiledForward,
    func: Func,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """Does a transposed convolution, and keeps the rows that are this device's."""
    spatial = weight.dim() - 2
    kernels = weight.shape[2:]
    strides, dilations = each(stride, spatial), each(dilation, spatial)
    pads, extra = each(padding, spatial), each(output_padding, spatial)
    outputs = [
        (n - 1) * s - 2 * p + d * (k - 1) + e + 1
        for n, k, s, p, e, d in zip(input.shape[-spatial:], kernels, strides, pads, extra, dilations, strict=True)
    ]
    cut = Neighbourhood(tiled, func, input, spatial, outputs)
    spreads = [
        spreading(input.shape[2 + i], outputs[i], axis.parts, kernels[i], strides[i], pads[i], dilations[i])
        for axis, i in ((axis, axis.which) for axis in cut.axes if cut.possible)
    ]
    # With strides longer than the kernel some outputs come from no input at all.
    if not cut.possible or any(start == stop for spread in spreads for start, stop in spread.needed.need):
        return cut.on_whole(func, weight, bias, stride, padding, output_padding, groups, dilation)
    needed = [spread.needed for spread in spreads]
    if (x := cut.by_sample(needed)) is not None:
        return x.like(func(x.local, weight, bias, stride, padding, output_padding, groups, dilation))
    is_cut = [2 + i in cut.dims for i in range(spatial)]
    inner = [0 if cut_here else p for cut_here, p in zip(is_cut, pads, strict=True)]
    outer = [0 if cut_here else e for cut_here, e in zip(is_cut, extra, strict=True)]

    def op(x: torch.Tensor) -> torch.Tensor:
        local: torch.Tensor = func(x, weight, None, strides, inner, outer, groups, dilations)
        for axis, dim, spread in zip(cut.axes, cut.dims, spreads, strict=True):
            start, stop = axis.own(outputs[axis.which])
            first = spread.starts[axis.index]
            # Rows to which no input row adds anything, before the first that has one and after the last.
            missing = max(0, -first), max(0, first + stop - start - local.size(dim))
            local = pad_one(local, dim, missing).narrow(dim, max(0, first), stop - start)
        return local if bias is None else local + bias.view(-1, *[1] * spatial)

    return cut.run(needed, op)


# ── pooling ──────────────────────────────────────────────────────────────────────────────────────────────────


def max_pool(
    tiled: TiledForward,
    func: Func,
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """Pools by the highest value; padding is lower than any."""
    if return_indices:
        return NotImplemented
    kernels, strides, pads = _pooling(func, kernel_size, stride, padding)
    spatial = len(kernels)
    lengths, dilations = input.shape[-spatial:], each(dilation, spatial)
    outputs = [
        output_rows(n, k, s, (p, p), d, ceil_mode)
        for n, k, s, p, d in zip(lengths, kernels, strides, pads, dilations, strict=True)
    ]
    cut = Neighbourhood(tiled, func, input, spatial, outputs)
    if not cut.possible:
        return cut.on_whole(func, kernel_size, stride, padding, dilation, ceil_mode)
    how = MaxPool(kernels, strides, pads, dilations, ceil_mode)
    needed = cut.needed(
        lambda i, n, m, parts: sliding(n, m, parts, kernels[i], strides[i], pads[i], dilations[i], exactly=ceil_mode)
    )
    if (x := cut.by_sample(needed)) is not None:
        return x.like(how.run(func, x.local))
    inner = tuple(0 if 2 + i in cut.dims else p for i, p in enumerate(pads))
    lowest = -math.inf if input.is_floating_point() else torch.iinfo(input.dtype).min
    return cut.run(needed, lambda x: replace(how, padding=inner).run(func, x), lowest)


def average_pool(
    tiled: TiledForward,
    func: Func,
    input: torch.Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Pools by the mean; what a window at the border is divided by is worked out for the whole."""
    kernels, strides, pads = _pooling(func, kernel_size, stride, padding)
    spatial = len(kernels)
    lengths = input.shape[-spatial:]
    outputs = [
        output_rows(n, k, s, (p, p), 1, ceil_mode) for n, k, s, p in zip(lengths, kernels, strides, pads, strict=True)
    ]
    more = () if spatial == 1 else (divisor_override,)
    cut = Neighbourhood(tiled, func, input, spatial, outputs)
    if not cut.possible:
        return cut.on_whole(func, kernel_size, stride, padding, ceil_mode, count_include_pad, *more)
    needed = cut.needed(lambda i, n, m, parts: sliding(n, m, parts, kernels[i], strides[i], pads[i], 1))
    if (x := cut.by_sample(needed)) is not None:
        return x.like(func(x.local, kernel_size, stride, padding, ceil_mode, count_include_pad, *more))
    # Along the dims that are not cut: padding, and what the last window overhangs.
    each_dim = list(zip(lengths, outputs, kernels, strides, pads, strict=True))
    overhangs = [(m - 1) * s + k - n - p for n, m, k, s, p in each_dim]
    around = _uncut(cut, list(zip(pads, overhangs, strict=True)))
    counts = [[_counted(o * s - p, k, n, p, count_include_pad) for o in range(m)] for n, m, k, s, p in each_dim]

    def op(x: torch.Tensor) -> torch.Tensor:
        for i, pair in enumerate(around):
            x = pad_one(x, 2 + i, pair)
        mean: torch.Tensor = func(x, kernels, strides)
        if divisor_override is not None:
            return mean * (math.prod(kernels) / divisor_override)
        for i, (k, of_dim) in enumerate(zip(kernels, counts, strict=True)):
            axis = next((axis for axis in cut.axes if axis.which == i), None)
            own = of_dim if axis is None else of_dim[slice(*axis.own(len(of_dim)))]
            if any(count != k for count in own):
                shape = [-1 if dim == 2 + i else 1 for dim in range(x.dim())]
                mean = mean * torch.tensor([k / count for count in own], dtype=x.dtype).view(shape)
        return mean

    return cut.run(needed, op)


def _pooling(func: Func, kernel_size: Any, stride: Any, padding: Any) -> tuple[tuple[int, ...], ...]:
    """Returns kernel, stride and padding of a pooling, one number a spatial dim each."""
    spatial = int(func.__name__[-2])
    kernels = each(kernel_size, spatial)
    return kernels, kernels if stride is None or stride == [] else each(stride, spatial), each(padding, spatial)


def _counted(start: int, kernel: int, length: int, padding: int, with_padding: bool) -> int:
    """Returns how many rows a window is divided by: those in the image, or in the image and its padding."""
    stop = min(start + kernel, length + padding)
    return stop - start if with_padding else min(stop, length) - max(start, 0)


# ── padding ──────────────────────────────────────────────────────────────────────────────────────────────────


def pad(
    tiled: TiledForward,
    func: Func,
    input: torch.Tensor,
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Any:
    """Pads a tile with a constant."""
    if not isinstance(input, Tile) or mode != "constant":
        return NotImplemented
    amounts = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    pads = [(0, 0)] * (input.dim() - len(amounts)) + amounts[::-1]
    axes = tiled.grid.axes
    outputs = tuple(n + sum(pads[dim]) for n, dim in zip(input.lengths, input.dims, strict=True))
    if any(m < axis.parts for m, axis in zip(outputs, axes, strict=True)):
        return NotImplemented
    fill = 0.0 if value is None else value
    x = Widened(
        input,
        [
            sliding(n, m, axis.parts, 1, 1, pads[dim][0], 1)
            for n, m, axis, dim in zip(input.lengths, outputs, axes, input.dims, strict=True)
        ],
        fill,
    ).x
    for dim, pair in enumerate(pads):
        if dim not in input.dims:
            x = pad_one(x, dim, pair, fill)
    return Tile(x, input.dims, outputs, tiled)
