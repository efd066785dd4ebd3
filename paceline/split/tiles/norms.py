"""Normalization by statistics of whole images: every device adds what it sees of them.

BatchNorm is already done so over replicas (`optim/batchnorm.py`), and here the devices of a replica join in. GroupNorm
and InstanceNorm are the same arithmetic with other groups of numbers: a sample's group of channels takes the place of a
channel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from paceline.optim.batchnorm import ExactBatchNorm
from paceline.split.tiles.samples import BY_SAMPLE
from paceline.split.tiles.tile import Func, Tile
from paceline.torch_private import AnyBatchNorm

if TYPE_CHECKING:
    from paceline.split.tiles.tiled_forward import TiledForward


class TiledBatchNorm:
    """Takes the place of a BatchNorm's forward: on tiles, its statistics are sums over the devices."""

    def __init__(self, tiled: TiledForward, module: AnyBatchNorm) -> None:
        self._tiled, self._module = tiled, module

        self.sees_tiles = False  # in the run that shows what the model does: then its statistics are sums over devices
        module.forward = self  # type: ignore[method-assign, assignment]

    def _own_forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = type(self._module).forward(self._module, x)
        return found

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        tiled, module = self._tiled, self._module
        tile = x if isinstance(x, Tile) else None
        tiled.note(module, on_tiles=tile is not None)
        if tiled.is_dry_run:
            # Nothing is added up yet: what comes out has the right size, and that is all that is looked at.
            self.sees_tiles |= tile is not None
            return x.view_as(x) if tile is None else tile.like(tile.local)
        by_batch = module.training or module.running_mean is None
        if by_batch and module.training and self.sees_tiles and tile is None:
            tiled.changed_its_way(module)
        if tile is None:
            return self._own_forward(x)
        if by_batch and not (module.training and self.sees_tiles):
            return self._own_forward(tiled.whole(tile, type(module).forward))
        return tile.like(self._own_forward(tile.local))

    def undo(self) -> None:
        """Gives the module its own forward back."""
        del self._module.forward


def group_norm(
    tiled: TiledForward,
    func: Func,
    input: Any,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Normalizes groups of channels by statistics that all devices add up."""
    if not isinstance(input, Tile):
        return NotImplemented
    local = input.local
    tiled.stay_as_they_lie()  # by row they would be made planes every time
    if input.dims == BY_SAMPLE:
        return input.like(F.group_norm(local, num_groups, weight, bias, eps))
    if min(input.dims) < 2:
        return NotImplemented
    groups = local.contiguous().view(1, len(local) * num_groups, -1)
    normalized = ExactBatchNorm.apply(  # type: ignore[no-untyped-call]
        groups, None, None, eps, tiled.grid.everyone.all_reduce
    )[0].view(local.shape)
    shape = (-1, *[1] * (local.dim() - 2))
    if weight is not None:
        normalized = normalized * weight.view(shape)
    if bias is not None:
        normalized = normalized + bias.view(shape)
    return input.like(normalized)


def instance_norm(
    tiled: TiledForward,
    func: Func,
    input: Any,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Does so channel by channel, without running statistics."""
    if running_mean is not None or not use_input_stats:
        return NotImplemented
    return group_norm(tiled, func, input, input.size(1), weight, bias, eps)
