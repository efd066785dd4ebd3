"""What devices do together in the middle of a forward, with the matching thing in backward.

copied     the same on all → same        backward: the sum of what all devices find for it
reduced    a summand each → the sum      backward: the same for all
gathered   a part each → the whole       backward: this device's part of it (all go on with the whole alike)
sliced     the same on all → a part      backward: the whole, from all parts
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.exchange.mailboxes import DeviceGroup
from paceline.split.once_differentiable import once_differentiable
from paceline.torch_private import inside_forward_derivative


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: DeviceGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.all_reduce(dy), None


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: DeviceGroup) -> torch.Tensor:
        return group.all_reduce(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: DeviceGroup, dim: int) -> torch.Tensor:
        parts = group.exchange(x)
        ctx.dim, ctx.length = dim, x.size(dim)
        ctx.start = sum(part.size(dim) for part in parts[: group.index])
        return torch.cat(parts, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return dy.narrow(ctx.dim, ctx.start, ctx.length), None, None


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: DeviceGroup, dim: int, bounds: Sequence[int]) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        start, stop = bounds[group.index], bounds[group.index + 1]
        return x.narrow(dim, start, stop - start).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.group.all_gather(dy, ctx.dim), None, None, None


def _followed() -> bool:
    """Returns whether somebody follows what is computed: where nobody does, requests say, the way is shorter."""
    return torch.is_grad_enabled() or inside_forward_derivative()


def copied(x: torch.Tensor, group: DeviceGroup) -> torch.Tensor:
    """Returns `x`, which all have alike; backward, the gradients of all are summed."""
    return _Copied.apply(x, group) if group.count > 1 and _followed() else x  # type: ignore[no-untyped-call]


def reduced(x: torch.Tensor, group: DeviceGroup) -> torch.Tensor:
    """Returns the sum of everybody's `x`; backward, its gradient is the same for all."""
    if group.count > 1 and _followed():
        return _Reduced.apply(x, group)  # type: ignore[no-untyped-call, no-any-return]
    return group.all_reduce(x)


def gathered(x: torch.Tensor, group: DeviceGroup, dim: int) -> torch.Tensor:
    """Returns everybody's `x` side by side along `dim`; backward, each takes its part of the gradient."""
    return _Gathered.apply(x, group, dim) if group.count > 1 else x  # type: ignore[no-untyped-call]


def sliced(x: torch.Tensor, group: DeviceGroup, dim: int) -> torch.Tensor:
    """Returns this device's part of `x`, which all have; backward, the parts are put together."""
    if group.count == 1:
        return x
    return _Sliced.apply(x, group, dim, bounds(x.size(dim), group.count))  # type: ignore[no-untyped-call, no-any-return]


def bounds(length: int, parts: int) -> list[int]:
    """Returns where `length` is cut into `parts` as equal as can be, the longer ones first.

    >>> bounds(7, 3)
    [0, 3, 5, 7]
    """
    whole, rest = divmod(length, parts)
    found = [0]
    for part in range(parts):
        found.append(found[-1] + whole + (part < rest))
    return found
