"""Operators on parts of tensors, where the operator itself has to be another one than on whole tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from paceline.exchange.mailboxes import DeviceGroup
from paceline.optim import direct_gradients, products
from paceline.split.collectives import bounds, copied, gathered, reduced, sliced
from paceline.split.once_differentiable import once_differentiable


def take_part(x: torch.Tensor, group: DeviceGroup, dim: int, whole: int, inner: int) -> torch.Tensor:
    """Returns this device's part of a factor of a dim; `inner` is the product of the factors behind it."""
    if x.size(dim) == whole * inner and inner == 1:
        return sliced(x, group, dim)
    return sliced(_unflat(x, dim, whole, inner), group, dim + 1).flatten(dim, dim + 2)


def put_together(x: torch.Tensor, group: DeviceGroup, dim: int, part: int, inner: int) -> torch.Tensor:
    """Returns the whole of a factor of a dim, from everybody's part."""
    if x.size(dim) == part * inner and inner == 1:
        return gathered(x, group, dim)
    return gathered(_unflat(x, dim, part, inner), group, dim + 1).flatten(dim, dim + 2)


def _unflat(x: torch.Tensor, dim: int, middle: int, inner: int) -> torch.Tensor:
    return x.reshape(*x.shape[:dim], -1, middle, inner, *x.shape[dim + 1 :])


def _summed(found: torch.Tensor, groups: Sequence[DeviceGroup]) -> torch.Tensor:
    for group in groups:
        found = reduced(found, group)
    return found


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: Sequence[DeviceGroup]
) -> torch.Tensor:
    """Returns x @ weight where the input dim may be in parts: every device has a summand; the bias is added once."""
    if not groups:
        return products.linear(x, weight, bias, F.linear)
    found = _summed(products.linear(x, weight, None, F.linear), groups)
    return found if bias is None else found + bias


def added_product(bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor, groups: Sequence[DeviceGroup]) -> torch.Tensor:
    """Returns bias + x @ y, where what is summed over may be in parts."""
    return direct_gradients.addmm(bias, x, y) if not groups else _summed(products.product(x, y), groups) + bias


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: dict[str, Any],
    groups: Sequence[DeviceGroup],
) -> torch.Tensor:
    """Returns the same for a convolution whose input channels may be in parts."""
    convolution: Any = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
    if not groups:
        return convolution(x, weight, bias, **options)  # type: ignore[no-any-return]
    found = _summed(convolution(x, weight, None, **options), groups)
    return found if bias is None else found + bias.view(1, -1, *[1] * (found.dim() - 2))


def look_up(
    ids: torch.Tensor, weight: torch.Tensor, padding_idx: int, start: int, groups: Sequence[DeviceGroup]
) -> torch.Tensor:
    """Returns rows of a table of which this device has those from `start` on: who has a row gives it, the others
    zeros."""
    rows = weight.size(0)
    own = ids - start
    here = (own >= 0) & (own < rows)
    padding = padding_idx - start if padding_idx >= 0 else -1
    found = F.embedding(own.clamp(0, max(0, rows - 1)), weight, padding if 0 <= padding < rows else None)
    return _summed(found * here.unsqueeze(-1), groups)


def mean(x: torch.Tensor, dims: Sequence[int], keep: bool, count: int, kind: torch.dtype | None) -> torch.Tensor:
    """Returns this device's summand of a mean over `count` elements."""
    return x.sum(list(dims), keepdim=keep, dtype=kind) / count


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, whole: int, group: DeviceGroup
) -> torch.Tensor:
    """Normalizes over a last dim that is in parts: two sums over the devices, about as many numbers as there are
    samples."""

    def over_all(values: torch.Tensor) -> torch.Tensor:
        return copied(reduced(values.sum(-1, keepdim=True), group), group) / whole

    centred = x - over_all(x)
    found = centred * torch.rsqrt(over_all(centred.square()) + eps)
    found = found * weight if weight is not None else found
    return found + bias if bias is not None else found


# ── what is drawn ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class WholeMask:
    """What one process would drop of a tensor of which this device has parts: the mask of all of it is drawn."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in which order its elements are drawn
    cuts: tuple[tuple[int, int, int, DeviceGroup], ...]  # dim, whole size of the factor, size of what is behind, group

    def draw(self, p: float, kind: torch.dtype) -> torch.Tensor:
        """Returns this device's part of the mask, scaled."""
        mask = torch.empty_strided(self.shape, self.strides, dtype=kind).bernoulli_(1 - p)
        if p < 1:
            mask.div_(1 - p)
        for dim, whole, inner, group in self.cuts:
            ends = bounds(whole, group.count)
            start, stop = ends[group.index], ends[group.index + 1]
            if math.prod(mask.shape[dim : dim + 1]) == whole * inner and inner == 1:
                mask = mask.narrow(dim, start, stop - start)
            else:
                mask = _unflat(mask, dim, whole, inner).narrow(dim + 1, start, stop - start).flatten(dim, dim + 2)
        return mask


def dropout(x: torch.Tensor, p: float, mask: WholeMask) -> torch.Tensor:
    """Drops as one process does."""
    return x * mask.draw(p, x.dtype)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    mask: WholeMask,
) -> torch.Tensor:
    """Attends with some of the heads, and drops as one process does with all of them."""
    if key.size(-3) != query.size(-3):
        times = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    root = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.size(-1)))
    scores = (query * root) @ (key * root).transpose(-2, -1)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if bias is not None:
        scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
    nothing = (scores == float("-inf")).all(-1, keepdim=True)  # who may look at nothing finds nothing, as in torch
    looked_at = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    return (looked_at * mask.draw(p, scores.dtype)) @ value


# ── classes in parts ─────────────────────────────────────────────────────────────────────────────────────────


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, reduction: int, ignored: int, start: int, group: DeviceGroup
) -> torch.Tensor:
    """Returns the loss of rows whose classes are in parts, of which this device has those from `start` on."""
    of_rows, counted = _OfRows.apply(logits, target, ignored, start, group)  # type: ignore[no-untyped-call]
    if reduction == 0:
        return of_rows  # type: ignore[no-any-return]
    return of_rows.sum() / counted.sum() if reduction == 1 else of_rows.sum()  # type: ignore[no-any-return]


class _OfRows(torch.autograd.Function):
    """log Σ exp(x) − x[target] of every row, from everybody's part of x."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, target: torch.Tensor, ignored: int, start: int, group: DeviceGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counted = target != ignored
        own = (target - start).clamp(0, x.size(1) - 1)
        here = counted & (target >= start) & (target < start + x.size(1))
        largest = torch.stack(group.exchange(x.amax(1))).amax(0)
        exponentials = (x - largest[:, None]).exp_()
        picked = x.gather(1, own[:, None])[:, 0] * here
        total, chosen = group.all_reduce(torch.stack([exponentials.sum(1), picked]))
        ctx.save_for_backward(exponentials, total, own, here, counted)
        ctx.mark_non_differentiable(counted)
        return (total.log() + largest - chosen) * counted, counted

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        exponentials, total, own, here, counted = ctx.saved_tensors
        dy = dy * counted
        dx = exponentials * (dy / total)[:, None]
        dx.scatter_add_(1, own[:, None], -(dy * here)[:, None])
        return dx, None, None, None, None


# ── gradients of parameters ──────────────────────────────────────────────────────────────────────────────────


class _HeardOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: DeviceGroup) -> torch.Tensor:
        ctx.first = group.index == 0
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (dy if ctx.first else torch.zeros_like(dy)), None


def heard_once(x: torch.Tensor, group: DeviceGroup) -> torch.Tensor:
    """Returns `x`; what all find alike for its gradient is the first one's to say, where others say summands."""
    return _HeardOnce.apply(x, group)  # type: ignore[no-untyped-call, no-any-return]
