"""Images of few rows are dealt out by sample: seven rows of eight images are four and three, or four images each.

Deep in a network images are small. Rows no longer divide evenly, and every device waits for the one that has more of
them, in every layer; and of those that do, the halo is a good part. From there on each device has some of the samples
instead, whole. To get there everybody sends everybody else the rows of its samples, once, and backward the other way
round. Tiles that are cut otherwise and meet again later (a U-Net's skips) are moved in the same way. An image that is
not cut yet is dealt out with nothing sent: there a smaller halo is enough.

Which of the two it is depends on the size of the batch, and nothing else may: what is done on tiles by row is done on
tiles by sample, and where an image by row becomes a whole (its mean, say), so does one by sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.exchange.mailboxes import DeviceGroup
from paceline.memory.channels_last import laid_like
from paceline.split.once_differentiable import once_differentiable
from paceline.split.tiles.needed_rows import NeededRows, ranges
from paceline.split.tiles.tile import MovedTile, Tile
from paceline.torch_private import times_changed

if TYPE_CHECKING:
    from paceline.split.tiles.tiled_forward import TiledForward

BY_SAMPLE = (0,)  # the dims of a tile that is cut so
# By how much the largest share of the rows has to be above that of the samples. Measured on resnet18: layers of 56 rows
# on two devices, of which one is borrowed, gain 9 %.
PAYS = 1.03
PAYS_AT_ONCE = 1.015  # of an image that is not cut yet: nothing has to be moved, and nothing put together


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
        parts[index] if index == group.index else laid_like(x, group.peers.receive(rank))
        for index, rank in enumerate(group.ranks)
    ]
    return torch.cat(found, source)


def moved(tile: Tile, dim: int) -> Tile:
    """Returns the same tensor, cut along another dim. Only where images are cut in one direction.

    A residual block needs its input twice: who is moved again unchanged is there already."""
    ((axis,), (source,), length) = tile.tiled.grid.axes, tile.dims, tile.shape[dim]
    state = dim, times_changed(tile.local), torch.is_grad_enabled()
    if (kept := tile.moved) is None or kept.state != state or times_changed(kept.tile.local) != kept.times_changed:
        lengths = tile.lengths[0], length
        local = _Moved.apply(tile.local, axis.group, source, dim, lengths)  # type: ignore[no-untyped-call]
        tile.moved = kept = MovedTile(Tile(local, (dim,), (length,), tile.tiled), times_changed(local), state)
    return kept.tile


def dealt_out(x: torch.Tensor, tiled: TiledForward) -> Tile:
    """Returns an image that is whole on all devices, cut by sample."""
    (axis,), samples = tiled.grid.axes, x.size(0)
    start, stop = axis.own(samples)
    return Tile(x[start:stop], BY_SAMPLE, (samples,), tiled)


def few_rows(x: torch.Tensor, parts: int, needed: NeededRows, outputs: int) -> bool:
    """Returns whether rows are less evenly divided than samples are: so many `outputs` of an op, or those that it
    needs, halo included."""
    samples, (_, rows) = x.shape[0], needed.have[-1]
    most_needed = max(stop - start for start, stop in needed.need)
    by_row = max(_largest_share(outputs, parts), most_needed * parts / rows)
    pays = PAYS if isinstance(x, Tile) else PAYS_AT_ONCE
    return samples >= parts and _largest_share(samples, parts) * pays <= by_row


def _largest_share(length: int, parts: int) -> float:
    """Returns how much the device with the most has, where 1 is an even share."""
    return -(-length // parts) * parts / length
