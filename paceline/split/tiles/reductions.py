"""Sums and means over an image, from every device's own: a few numbers a channel, not the image."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paceline.split.tiles.halo_exchange import summed
from paceline.split.tiles.samples import BY_SAMPLE
from paceline.split.tiles.tile import Func, Tile

if TYPE_CHECKING:
    from paceline.split.tiles.tiled_forward import TiledForward


def add_up(tiled: TiledForward, func: Func, input: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """Does `sum` and `mean`: over all that is cut, or over none of it."""
    if not isinstance(input, Tile) or not input.is_floating_point() or kwargs.get("dtype") is not None:
        return NotImplemented
    dims = _dims(input, dim)
    if _rows_go(input, dims):
        return NotImplemented
    over = [cut for cut in input.dims if cut in dims]
    if not over:
        return _kept(input, func(input.local, dims, keepdim), dims, keepdim)
    if len(over) < len(input.dims):
        return NotImplemented
    total = summed(input.local.sum(dims, keepdim), tiled.grid.everyone)
    return total / math.prod(input.shape[d] for d in dims) if func.__name__ == "mean" else total


def highest(tiled: TiledForward, func: Func, input: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """Does `amax`, `amin` and their like, over channels."""
    if not isinstance(input, Tile) or dim is None or kwargs:
        return NotImplemented
    dims = _dims(input, dim)
    if any(cut in dims for cut in input.dims) or _rows_go(input, dims):
        return NotImplemented
    return _kept(input, func(input.local, dim, keepdim), dims, keepdim)


def pool_to_one(tiled: TiledForward, func: Func, input: Tile, output_size: Any) -> Any:
    """Does adaptive average pooling, if it leaves one pixel."""
    spatial = int(func.__name__[-2])
    sizes = output_size if isinstance(output_size, (tuple, list)) else [output_size] * spatial
    if any(size != 1 for size in sizes) or input.dim() != spatial + 2 or min(input.dims) < 2:
        return NotImplemented
    dims = tuple(range(2, input.dim()))
    return summed(input.local.sum(dims, keepdim=True), tiled.grid.everyone) / math.prod(input.shape[2:])


def _rows_go(tile: Tile, dims: tuple[int, ...]) -> bool:
    """Returns whether images that lie by sample lose their rows: then they become a whole, as images by row do."""
    return tile.dims == BY_SAMPLE and 2 + tile.tiled.grid.axes[0].which in dims


def _dims(tile: Tile, dim: Any) -> tuple[int, ...]:
    """Returns the dims that `dim` means, all if it is None."""
    if dim is None:
        return tuple(range(tile.dim()))
    return tuple(d % tile.dim() for d in (dim if isinstance(dim, (tuple, list)) else (dim,)))


def _kept(tile: Tile, local: Any, dims: tuple[int, ...], keepdim: bool) -> Tile:
    """Returns the tile that is left when dims are gone that are not cut."""
    left = tile.dims if keepdim else tuple(cut - sum(d < cut for d in dims) for cut in tile.dims)
    return Tile(local, left, tile.lengths, tile.tiled)
