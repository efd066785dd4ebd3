"""Images of few rows are dealt out by sample: seven rows of eight images are four and three, or four images each.

Deep in a network images are small. Rows no longer divide evenly, and every device waits for the one that has more of
them, in every layer. From there on each device has some of the samples instead, whole. To get there everybody sends
everybody else the rows of its samples, once, and backward the other way round. Tiles that are cut otherwise and meet
again later (a U-Net's skips) are moved in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from paceline.exchange.mailboxes import DeviceGroup
from paceline.split.tiles.halo_exchange import as_laid_out
from paceline.split.tiles.needed_rows import ranges
from paceline.split.tiles.tile import Func, Tile, find

if TYPE_CHECKING:
    from paceline.split.tiles.tiled_forward import TiledForward

BY_SAMPLE = (0,)  # the dims of a tile that is cut so
PAYS = 1.05  # by how much the largest share of the rows has to be above that of the samples


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: DeviceGroup, source: int, target: int, lengths: tuple[int, int]
    ) -> torch.Tensor:
        ctx.group, ctx.source, ctx.target, ctx.lengths = group, source, target, lengths
        return _exchanged(x, group, source, target, lengths[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchanged(dy, ctx.group, ctx.target, ctx.source, ctx.lengths[0]), None, None, None, None


def _exchanged(x: torch.Tensor, group: DeviceGroup, source: int, target: int, length: int) -> torch.Tensor:
    """Returns this device's part along `target`, of so many, from everybody's along `source`."""
    parts = [x.narrow(target, start, stop - start) for start, stop in ranges(length, group.count)]
    for index, rank in enumerate(group.ranks):
        if index != group.index:
            group.peers.send(parts[index], rank)
    found = [
        parts[index] if index == group.index else as_laid_out(x, group.peers.receive(rank))
        for index, rank in enumerate(group.ranks)
    ]
    return torch.cat(found, source)


def moved(tile: Tile, dim: int) -> Tile:
    """Returns the same tensor, cut along another dim. Only where images are cut in one direction."""
    ((axis,), (source,), length) = tile.tiled.grid.axes, tile.dims, tile.shape[dim]
    lengths = tile.lengths[0], length
    local = _Moved.apply(tile.local, axis.group, source, dim, lengths)  # type: ignore[no-untyped-call]
    return Tile(local, (dim,), (length,), tile.tiled)


def dealt_out(tiled: TiledForward, x: torch.Tensor, outputs: Sequence[int]) -> Tile | None:
    """Returns images by sample, if what an op makes of them, of these lengths, is better cut so; None if not."""
    axes = tiled.grid.axes
    if not isinstance(x, Tile) or len(axes) > 1 or x.dim() != len(outputs) + 2 or x.dims != (2 + axes[0].which,):
        return None
    parts, samples = axes[0].parts, x.shape[0]
    if samples < parts or _largest_share(samples, parts) * PAYS > _largest_share(outputs[axes[0].which], parts):
        return None
    return moved(x, 0)


def _largest_share(length: int, parts: int) -> float:
    """Returns how much the device with the most has, where 1 is an even share."""
    return -(-length // parts) * parts / length


def each_sample(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Does on this device's samples what is done to each by itself, if they lie so."""
    tile = args[0] if args else None
    if not isinstance(tile, Tile) or tile.dims != BY_SAMPLE or find((*args[1:], *kwargs.values())) is not None:
        return NotImplemented
    local = func(tile.local, *args[1:], **kwargs)
    return tile.like(local) if isinstance(local, torch.Tensor) else NotImplemented
