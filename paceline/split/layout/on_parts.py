"""Operators on parts of tensors, where the operator itself has to be another one than on whole tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from paceline.exchange.mailboxes import DeviceGroup
from paceline.split.collectives import bounds, copied, gathered, reduced, sliced
from paceline.split.tiles.needed_rows import paddings


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


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    shape: Sequence[int],
    groups: Sequence[DeviceGroup],
) -> torch.Tensor:
    """Returns x @ weight where the input dim is in parts: every device has a summand; the bias is added once."""
    # As it is, if that will do: the gradient of a parameter may be computed where it goes, that of a view may not.
    weight = weight if weight.shape == tuple(shape) else weight.reshape(tuple(shape))
    bias = bias.reshape(-1) if bias is not None else None
    if not groups:
        return F.linear(x, weight, bias)
    found = F.linear(x, weight)
    for group in groups:
        found = reduced(found, group)
    return found if bias is None else found + bias


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    module: Any,
    channel_groups: int,
    groups: Sequence[DeviceGroup],
) -> torch.Tensor:
    """Returns the same for a convolution whose input channels are in parts; `channel_groups` of the module's are
    here."""
    convolution: Any = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
    padding = module.padding
    if module.padding_mode != "zeros":
        around = paddings(padding, module.kernel_size, module.dilation)
        last_dim_first = [amount for pair in reversed(around) for amount in pair]
        x, padding = F.pad(x, last_dim_first, mode=module.padding_mode), 0
    found: torch.Tensor = convolution(
        x, weight, bias if not groups else None, module.stride, padding, module.dilation, channel_groups
    )
    for group in groups:
        found = reduced(found, group)
    return found if bias is None or not groups else found + bias.view(1, -1, *[1] * (found.dim() - 2))


def look_up(
    ids: torch.Tensor, weight: torch.Tensor, module: Any, start: int, groups: Sequence[DeviceGroup]
) -> torch.Tensor:
    """Returns rows of a table of which this device has those from `start` on: who has a row gives it, the others
    zeros."""
    rows = weight.size(0)
    own = ids - start
    here = (own >= 0) & (own < rows)
    padding = module.padding_idx - start if module.padding_idx is not None else -1
    found = F.embedding(own.clamp(0, max(0, rows - 1)), weight, padding if 0 <= padding < rows else None)
    found = found * here.unsqueeze(-1)
    for group in groups:
        found = reduced(found, group)
    return found


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, whole: int, group: DeviceGroup
) -> torch.Tensor:
    """Normalizes over a last dim that is in parts: two sums over the devices, about as many numbers as there are
    samples."""

    def mean(values: torch.Tensor) -> torch.Tensor:
        return copied(reduced(values.sum(-1, keepdim=True), group), group) / whole

    centred = x - mean(x)
    found = centred * torch.rsqrt(mean(centred.square()) + eps)
    found = found * weight if weight is not None else found
    return found + bias if bias is not None else found


def dropout(
    x: torch.Tensor, p: float, training: bool, cuts: Sequence[tuple[int, int, int, DeviceGroup]]
) -> torch.Tensor:
    """Drops as one process does: the mask of the whole tensor is drawn, and this device's part of it is used."""
    if not training or p == 0.0:
        return x
    shape = list(x.shape)
    for dim, whole, _, group in cuts:
        part = bounds(whole, group.count)
        shape[dim] = shape[dim] // (part[group.index + 1] - part[group.index]) * whole
    mask = torch.empty(shape, dtype=x.dtype).bernoulli_(1 - p).div_(1 - p)
    for dim, whole, inner, group in cuts:
        part = bounds(whole, group.count)
        cut = _unflat(mask, dim, whole, inner)
        mask = cut.narrow(dim + 1, part[group.index], part[group.index + 1] - part[group.index]).flatten(dim, dim + 2)
    return x * mask


def dropout_module(x: torch.Tensor, module: Any, cuts: Sequence[tuple[int, int, int, DeviceGroup]]) -> torch.Tensor:
    """Does the same for nn.Dropout, in the mode in which the module is when it is called."""
    return dropout(x, module.p, module.training, cuts)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    module: Any,
    heads: int,
    groups: Sequence[DeviceGroup],
    options: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Does what nn.MultiheadAttention does for some of the heads: `in_proj_weight` is (3, heads, width, embed) of
    those."""
    width = module.head_dim
    weights = module.in_proj_weight.reshape(3, heads * width, -1)
    biases = module.in_proj_bias.reshape(3, -1) if module.in_proj_bias is not None else [None] * 3
    projected = []
    for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
        x = x if module.batch_first else x.transpose(0, 1)
        projected.append(F.linear(x, weight, bias).view(*x.shape[:2], heads, width).transpose(1, 2))
    q, k, v = projected
    mask = _mask(options, q)
    causal = bool(options.get("is_causal")) and mask is None
    found = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal).transpose(1, 2).flatten(2)
    found = F.linear(found, module.out_proj.weight.reshape(-1, heads * width))
    for group in groups:
        found = reduced(found, group)
    if module.out_proj.bias is not None:
        found = found + module.out_proj.bias
    return (found if module.batch_first else found.transpose(0, 1)), None


def _mask(options: dict[str, Any], q: torch.Tensor) -> torch.Tensor | None:
    mask, padding = options.get("attn_mask"), options.get("key_padding_mask")
    found = None
    for given in (mask, padding[:, None, None, :] if padding is not None else None):
        if given is None:
            continue
        if given.dtype == torch.bool:
            given = torch.zeros(given.shape, dtype=q.dtype).masked_fill_(given, float("-inf"))
        found = given if found is None else found + given
    return found


def view(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns `x` in that shape."""
    return x.reshape(tuple(shape))
