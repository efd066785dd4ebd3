"""A tile: what a device has of an activation, behind a tensor that has the size of the whole.

User code may ask it for its size, add it, give it to modules, as any tensor. It has no values of its own: whatever is
done with it comes to `__torch_function__`, and what slips past that is refused, never computed wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import ModelError
from paceline.exchange.mailboxes import DeviceGroup, Peers
from paceline.split.tiles.needed_rows import ranges
from paceline.split.values import Tiles
from paceline.torch_private import empty_tensor

if TYPE_CHECKING:
    from paceline.split.tiles.tiled_forward import TiledForward


Func = Callable[..., Any]  # of torch, or what does the same on tiles


class Axis:
    """One direction in which images are cut: their first spatial dim, rows, or their second one, columns."""

    def __init__(self, group: DeviceGroup, which: int) -> None:
        self.group = group
        self.which = which
        self.parts, self.index = group.count, group.index

    def own(self, length: int) -> tuple[int, int]:
        """Returns the rows (or columns) of this device, of so many."""
        return ranges(length, self.parts)[self.index]


class Grid:
    """The devices as they lie over the image, row by row. Directions that are not cut are left out."""

    def __init__(self, split: Tiles, peers: Peers) -> None:
        row, column = divmod(peers.rank, split.columns)
        in_column = peers.along([r * split.columns + column for r in range(split.rows)])
        in_row = peers.along([row * split.columns + c for c in range(split.columns)])
        self.axes = [Axis(group, which) for which, group in enumerate((in_column, in_row)) if group.count > 1]
        self.everyone = peers.everyone


class Tile(torch.Tensor):
    """This device's part, `local`, of a tensor. `dims` are those that are cut, in the order of the grid's axes."""

    local: torch.Tensor
    dims: tuple[int, ...]
    lengths: tuple[int, ...]  # of the whole, along these
    tiled: TiledForward
    moved: MovedTile | None

    @staticmethod
    def __new__(
        cls: type[Tile], local: torch.Tensor, dims: tuple[int, ...], lengths: tuple[int, ...], tiled: TiledForward
    ) -> Tile:
        shape = list(local.shape)
        for dim, length in zip(dims, lengths, strict=True):
            shape[dim] = length
        tile: Tile = empty_tensor(cls, shape, dtype=local.dtype, device=local.device)
        tile.local, tile.dims, tile.lengths, tile.tiled, tile.moved = local, dims, lengths, tiled, None
        return tile

    def like(self, local: torch.Tensor) -> Tile:
        """Returns another tensor, cut as this one is."""
        return Tile(local, self.dims, self.lengths, self.tiled)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Tile({tuple(self.local.shape)} of {self.lengths} along dims {self.dims})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tile = find((*args, *(kwargs or {}).values()))
        assert tile is not None
        return tile.tiled.run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise ModelError("model", str(func), "this operator was given a tile of an image and cannot be cut")


@dataclass(frozen=True)
class MovedTile:
    """A tile that was cut along another dim, as long as both are what they were then."""

    tile: Tile
    times_changed: int
    state: tuple[int, int, bool]  # along which dim, how often the other was changed before, with gradients or without


def find(values: Any) -> Tile | None:
    """Returns the first tile among these, or in a list of them; None if there is none."""
    for value in values:
        if isinstance(value, Tile):
            return value
        if type(value) in (list, tuple) and (found := find(value)) is not None:
            return found
    return None
