"""Rows on their way between devices: borrowed for an op, gathered to the whole, summed. Each with its adjoint.

    borrowed   own rows → the rows that are needed     backward: gradients of borrowed rows go back and are added
    gathered   a tile each → the whole, on all          backward: everybody's gradient of this tile, added up
    summed     a summand each → the sum, on all         backward: the same

Gradients of what is whole are summands. So the other way, from a whole to tiles, is a plain `narrow`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from paceline.exchange.mailboxes import DeviceGroup
from paceline.memory.channels_last import laid_like
from paceline.split.collectives import copied, reduced
from paceline.split.once_differentiable import once_differentiable
from paceline.split.tiles.needed_rows import NeededRows, Range, ranges
from paceline.split.tiles.tile import Tile
from paceline.torch_private import times_changed


def overlap(one: Range, other: Range) -> Range | None:
    """Returns the rows that are in both; None if there are none."""
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else None


def _rows(x: torch.Tensor, dim: int, origin: int, rows: Range) -> torch.Tensor:
    """Returns these rows of a tensor whose first one is row `origin`."""
    return x.narrow(dim, rows[0] - origin, rows[1] - rows[0])


class Pieces:
    """How a tensor was put together: own rows, and pieces beside them that are kept here."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.others: list[torch.Tensor | None] = []  # None: own rows go there
        self.own: Range = (0, 0)  # which of them

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Returns it, put together around this device's rows in `x`."""
        own = x.narrow(self.dim, *self.own)
        return torch.cat([own if piece is None else piece for piece in self.others], self.dim)


class _Borrowed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: DeviceGroup, needed: NeededRows, value: float, pieces: Pieces
    ) -> torch.Tensor:
        ctx.group, ctx.needed, ctx.dim = group, needed, pieces.dim
        me, dim, peers = group.index, pieces.dim, group.peers
        have, need = needed.have[me], needed.need[me]
        for index, rank in enumerate(group.ranks):
            if index != me and (rows := overlap(have, needed.need[index])):
                peers.send(_rows(x, dim, have[0], rows), rank)

        def padding(count: int) -> None:
            if count:
                shape = list(x.shape)
                shape[dim] = count
                pieces.others.append(laid_like(x, x.new_full(shape, value)))

        padding(needed.before[me])
        for index, rank in enumerate(group.ranks):
            rows = overlap(needed.have[index], need)
            if rows is not None and index == me:
                pieces.own = rows[0] - have[0], rows[1] - rows[0]
                pieces.others.append(None)
            elif rows is not None:
                pieces.others.append(laid_like(x, peers.receive(rank)))
        padding(needed.after[me])
        return pieces.join(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, needed, dim = ctx.group, ctx.needed, ctx.dim
        me, peers = group.index, group.peers
        have, need = needed.have[me], needed.need[me]
        origin = need[0] - needed.before[me]
        for index, rank in enumerate(group.ranks):
            if index != me and (rows := overlap(needed.have[index], need)):
                peers.send(_rows(dy, dim, origin, rows), rank)
        kept = overlap(have, need)
        if kept == have:
            dx = _rows(dy, dim, origin, have).clone(memory_format=torch.preserve_format)
        else:  # some rows were only for others
            shape = list(dy.shape)
            shape[dim] = have[1] - have[0]
            dx = laid_like(dy, dy.new_empty(shape)).zero_()
            if kept is not None:
                _rows(dx, dim, have[0], kept).copy_(_rows(dy, dim, origin, kept))
        for index, rank in enumerate(group.ranks):
            if index != me and (rows := overlap(have, needed.need[index])):
                _rows(dx, dim, have[0], rows).add_(peers.receive(rank))
        return dx, None, None, None, None


class _TilesGathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: DeviceGroup, dim: int, length: int) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.length = group, dim, length
        return torch.cat([laid_like(x, part) for part in group.exchange(x)], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, dim = ctx.group, ctx.dim
        parts = ranges(ctx.length, group.count)
        for index, rank in enumerate(group.ranks):
            if index != group.index:
                group.peers.send(_rows(dy, dim, 0, parts[index]), rank)
        dx = _rows(dy, dim, 0, parts[group.index]).clone()
        for index, rank in enumerate(group.ranks):
            if index != group.index:
                dx += group.peers.receive(rank)
        return dx, None, None, None


def summed(x: torch.Tensor, group: DeviceGroup) -> torch.Tensor:
    """Returns the sum of everybody's; backward, everybody's gradient of it is summed too."""
    return copied(reduced(x, group), group)


def gathered(tile: Tile) -> torch.Tensor:
    """Returns the whole of which everybody has a tile."""
    x = tile.local
    for axis, dim, length in reversed(list(zip(tile.tiled.grid.axes, tile.dims, tile.lengths, strict=True))):
        x = _TilesGathered.apply(x, axis.group, dim, length)  # type: ignore[no-untyped-call]
    return tile.tiled.side_by_side.for_users(x)


class Widened:
    """The rows that an op needs, in one tensor. What backward needs of it is kept as the device's own tile, which is
    kept anyway, and the halo: it is put together again then. Otherwise every activation would be there twice."""

    def __init__(self, tile: Tile, needed: list[NeededRows], value: float = 0.0) -> None:
        self._source = tile.local
        self._version = times_changed(tile.local)
        self._joins: list[Pieces] = []
        x = tile.local
        for axis, dim, of_axis in zip(tile.tiled.grid.axes, tile.dims, needed, strict=True):
            if not of_axis.nothing_moves:
                pieces = Pieces(dim)
                x = _Borrowed.apply(x, axis.group, of_axis, value, pieces)  # type: ignore[no-untyped-call]
                self._joins.append(pieces)
        self.x = x

    def kept_small(self) -> AbstractContextManager[Any]:
        """Returns what is to stand around the op, so that autograd keeps the pieces and not the tensor."""
        if not self._joins or not torch.is_grad_enabled():
            return nullcontext()
        at, shape = self.x.data_ptr(), self.x.shape
        again = _Again(self._source.detach(), self._version, self._joins)

        def pack(saved: torch.Tensor) -> torch.Tensor | _Again:
            return again if saved.data_ptr() == at and saved.shape == shape else saved

        def unpack(kept: torch.Tensor | _Again) -> torch.Tensor:
            return kept.join() if isinstance(kept, _Again) else kept

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class _Again:
    """How to put a widened tensor together once more."""

    def __init__(self, source: torch.Tensor, version: int, joins: list[Pieces]) -> None:
        self._source, self._version, self._joins = source, version, joins

    def join(self) -> torch.Tensor:
        if times_changed(self._source) != self._version:
            raise RuntimeError("an activation that is needed for its gradient has been changed in place since")
        x = self._source
        for pieces in self._joins:
            x = pieces.join(x)
        return x
