"""Ops that need no other row than their own: pixel by pixel, over channels, or moving dims about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline.memory.channels_last import channels_are_last
from paceline.split.tiles.samples import BY_SAMPLE, moved
from paceline.split.tiles.tile import Func, Tile, find
from paceline.torch_private import tree_map

if TYPE_CHECKING:
    from paceline.split.tiles.tiled_forward import TiledForward


# By name, as torch's functions, methods and torch.nn.functional have it in common.
_NAMES = """
    abs add addcdiv addcmul asinh atan bitwise_and bitwise_not bitwise_or bool celu clamp clamp_max clamp_min clip clone
    contiguous cos cosh deg2rad detach div divide double elu eq erf erfc exp expm1 float floor floor_divide fmod frac
    full_like gelu ge greater gt half hardshrink hardsigmoid hardswish hardtanh heaviside int isfinite isinf isnan
    le leaky_relu lerp less log log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor logit
    logsigmoid long lt masked_fill maximum minimum mish mul multiply nan_to_num ne neg negative ones_like positive pow
    reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign silu sin sinh softplus softshrink softsign
    sqrt square sub subtract tan tanh tanhshrink threshold to true_divide trunc type_as where xlogy zeros_like
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __mod__ __pow__ __rpow__
    __neg__ __pos__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __invert__
"""
POINTWISE = frozenset(_NAMES.split())


def in_place(func: Func, kwargs: dict[str, Any]) -> bool:
    """Returns whether it changes its first argument."""
    name = func.__name__
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (
            name[2] == "i" and name not in ("__int__", "__index__", "__invert__")
        )
    return name.endswith("_") or bool(kwargs.get("inplace"))


def is_pointwise(name: str) -> bool:
    """Returns whether the function of this name works value by value, in place or not."""
    return name in POINTWISE or (name.endswith("_") and not name.endswith("__") and name[:-1] in POINTWISE)


def pointwise(tiled: TiledForward, func: Func, *args: Any, **kwargs: Any) -> Any:
    """Works on the rows of this device: tiles of the same size lie alike, and of what is whole its part is taken."""
    changes = in_place(func, kwargs)
    if func.__name__ == "contiguous" or "memory_format" in kwargs:  # a copy or not: that depends on how it lies
        tiled.stay_as_they_lie()
    given = (*args, *kwargs.values())
    tile = find(given) if changes else _lead(given)
    assert tile is not None
    if changes and not isinstance(args[0], Tile):
        return NotImplemented
    if isinstance(out := kwargs.get("out"), Tile) and out.dims != tile.dims:
        return NotImplemented
    fits = True

    def part(value: Any) -> Any:
        nonlocal fits
        if isinstance(value, torch.Tensor):
            found = own_part(tile, value)
            fits &= found is not None
            return found
        return value

    own_args, own_kwargs = tuple(part(value) for value in args), {name: part(v) for name, v in kwargs.items()}
    if not fits:
        return NotImplemented
    local = func(*own_args, **own_kwargs)
    return args[0] if changes else tile.like(local)


def _lead(values: Any) -> Tile | None:
    """Returns the tile as which several are joined: one that is dealt out by sample, as what follows will be, or else
    the first."""
    return next((value for value in values if isinstance(value, Tile) and value.dims == BY_SAMPLE), find(values))


def own_part(tile: Tile, value: torch.Tensor) -> torch.Tensor | None:
    """Returns what meets `tile` of another tensor when they are broadcast together; None if they do not fit so."""
    if isinstance(value, Tile):
        if value.dim() != tile.dim() or any(value.size(d) != n for d, n in zip(tile.dims, tile.lengths, strict=True)):
            return None
        if value.dims != tile.dims and len(tile.dims) == 1:
            value = moved(value, *tile.dims)
        return value.local if value.dims == tile.dims else None
    missing = tile.dim() - value.dim()
    if missing < 0:
        return None
    for axis, dim, length in zip(tile.tiled.grid.axes, tile.dims, tile.lengths, strict=True):
        if dim < missing or value.size(dim - missing) == 1:
            continue
        if value.size(dim - missing) != length:
            return None
        start, stop = axis.own(length)
        value = value.narrow(dim - missing, start, stop - start)
    return value


def prelu(tiled: TiledForward, func: Func, input: Tile, weight: torch.Tensor) -> Any:
    """Has a slope for each channel, which is whole."""
    return input.like(func(input.local, weight)) if not isinstance(weight, Tile) else NotImplemented


def expand_as(tiled: TiledForward, func: Func, input: torch.Tensor, other: torch.Tensor) -> Any:
    """Returns a whole in a tile's size: a view, of which the tile's part is taken where it is used."""
    return NotImplemented if isinstance(input, Tile) else input.expand(other.shape)


def new(tiled: TiledForward, func: Func, input: Tile, *args: Any, **kwargs: Any) -> Any:
    """Does `new_zeros` and its like: only the type and the device come from the tile."""
    return func(input.local, *args, **kwargs)


def dropout(
    tiled: TiledForward, func: Func, input: Tile, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Draws the mask for the whole, as in one process, and the device takes its part: a byte a value."""
    if not training or p == 0:
        return input
    local = input.local
    if p == 1:
        noise = torch.zeros_like(local)
    else:
        tiled.stay_as_they_lie()
        last = channels_are_last(local) and not tiled.side_by_side.allowed
        layout = torch.channels_last if last else torch.contiguous_format
        mask = torch.empty(input.shape, dtype=torch.uint8, memory_format=layout).bernoulli_(1 - p)
        own = own_part(input, mask)
        assert own is not None
        noise = own.to(local.dtype).div_(1 - p)
    if inplace:
        local.mul_(noise)
        return input
    return input.like(local * noise)


# ── over dims that are not cut ───────────────────────────────────────────────────────────────────────────────


def along(tiled: TiledForward, func: Func, input: Any, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Does `func(input, dim)` that keeps the size: softmax over channels."""
    if not isinstance(input, Tile) or not isinstance(dim, int) or dim % input.dim() in input.dims:
        return NotImplemented
    return input.like(func(input.local, dim, *args, **kwargs))


def over_channels(tiled: TiledForward, func: Func, input: Tile, *args: Any, **kwargs: Any) -> Any:
    """Does what is the same on every part: dropout of channels, normalization across channels, BatchNorm by running
    statistics."""
    by_sample = input.dims == BY_SAMPLE and input.dim() > 2
    if (0 in input.dims and not by_sample) or 1 in input.dims or find(args) is not None:
        return NotImplemented
    if by_sample and func.__name__.startswith("dropout"):
        return _dropped_channels(func, input, *args, **kwargs)
    local = func(input.local, *args, **kwargs)
    return input if in_place(func, kwargs) else input.like(local)


def _dropped_channels(func: Func, input: Tile, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tile:
    """Draws for the channels of all samples, as in one process, and takes what is of this device's."""
    whole = func(input.local.new_ones([*input.shape[:2], *[1] * (input.dim() - 2)]), p, training, False)
    mask = own_part(input, whole)
    assert mask is not None
    if inplace:
        input.local.mul_(mask)
        return input
    return input.like(input.local * mask)


def batch_norm(
    tiled: TiledForward,
    func: Func,
    input: Tile,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalizes by running statistics. Those of the batch are the modules' (`norms`)."""
    if training:
        return NotImplemented
    return over_channels(tiled, func, input, running_mean, running_var, weight, bias, False, momentum, eps)


def layer_norm(
    tiled: TiledForward, func: Func, input: Any, normalized_shape: Sequence[int], *args: Any, **kwargs: Any
) -> Any:
    """Normalizes over last dims that are not cut."""
    if not isinstance(input, Tile) or max(input.dims) >= input.dim() - len(normalized_shape):
        return NotImplemented
    return input.like(func(input.local, normalized_shape, *args, **kwargs))


def linear(tiled: TiledForward, func: Func, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Multiplies along a last dim that is not cut."""
    if not isinstance(input, Tile) or max(input.dims) == input.dim() - 1:
        return NotImplemented
    return input.like(func(input.local, *args, **kwargs))


# ── dims moved about ─────────────────────────────────────────────────────────────────────────────────────────


def _moved(tile: Tile, local: torch.Tensor, dims: Sequence[int]) -> Tile:
    return Tile(local, tuple(dims), tile.lengths, tile.tiled)


def permute(tiled: TiledForward, func: Func, input: Tile, *dims: Any) -> Any:
    """Reorders dims."""
    order = [dim % input.dim() for dim in (dims[0] if isinstance(dims[0], (tuple, list)) else dims)]
    return _moved(input, func(input.local, order), [order.index(dim) for dim in input.dims])


def transpose(tiled: TiledForward, func: Func, input: Tile, dim0: int, dim1: int) -> Any:
    """Swaps two dims."""
    first, second = dim0 % input.dim(), dim1 % input.dim()
    swapped = {first: second, second: first}
    return _moved(input, func(input.local, first, second), [swapped.get(dim, dim) for dim in input.dims])


def reshape(tiled: TiledForward, func: Func, input: Any, *shape: Any) -> Any:
    """Changes the dims before those that are cut, such as channels to groups of channels."""
    if not isinstance(input, Tile):
        return NotImplemented
    sizes = list(shape[0]) if shape and isinstance(shape[0], (tuple, list, torch.Size)) else list(shape)
    if not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    if -1 in sizes:
        rest = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = input.numel() // rest if rest else 0
    by_sample = input.dims == BY_SAMPLE and input.dim() > 2 and sizes[:1] == [input.size(0)]
    first = 2 + tiled.grid.axes[0].which if by_sample else min(input.dims)
    tail = list(input.shape[first:])
    lead = len(sizes) - len(tail)
    if lead < 0 or sizes[lead:] != tail:
        return NotImplemented
    own = [len(input.local), *sizes[1:]] if by_sample else [*sizes[:lead], *input.local.shape[first:]]
    local = _viewed(tiled, func, input.local, own)
    if local is NotImplemented or by_sample:
        return local if local is NotImplemented else input.like(local)
    return _moved(input, local, [dim - first + lead for dim in input.dims])


def _viewed(tiled: TiledForward, func: Func, local: torch.Tensor, sizes: Sequence[int]) -> Any:
    """Returns `local` in another shape. Planes can be viewed in ways in which pixels cannot: then images must stay as
    they lie; where that comes up too late the image is gathered, which lies as planes."""
    if tiled.is_dry_run:
        tiled.side_by_side.check_view(local, sizes)
        return func(local if tiled.side_by_side.allowed else local.contiguous(), sizes)
    try:
        return func(local, sizes)
    except RuntimeError:
        return NotImplemented


def concatenate(tiled: TiledForward, func: Func, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    """Puts tensors together along a dim that is not cut."""
    tile = _lead(tensors)
    if tile is None or kwargs or dim % tile.dim() in tile.dims:
        return NotImplemented
    parts = [own_part(tile, tensor) if tensor.dim() == tile.dim() else None for tensor in tensors]
    if any(part is None for part in parts) or any(
        not isinstance(tensor, Tile) and tensor.size(cut) == 1 for tensor in tensors for cut in tile.dims
    ):
        return NotImplemented  # cat does not broadcast
    return tile.like(func(parts, dim))


def split(tiled: TiledForward, func: Func, input: Tile, size: Any, dim: int = 0) -> Any:
    """Does `chunk` and `split` along a dim that is not cut."""
    if dim % input.dim() in input.dims:
        return NotImplemented
    return tree_map(input.like, func(input.local, size, dim))


def narrow(tiled: TiledForward, func: Func, input: Any, dim: int, *args: Any) -> Any:
    """Does `narrow` and `index_select` along a dim that is not cut."""
    if not isinstance(input, Tile) or find(args) is not None or dim % input.dim() in input.dims:
        return NotImplemented
    return input.like(func(input.local, dim, *args))


def item(tiled: TiledForward, func: Func, input: Any, index: Any) -> Any:
    """Takes slices of dims that are not cut, such as some of the channels."""
    entries = index if isinstance(index, tuple) else (index,)
    if not isinstance(input, Tile) or not all(isinstance(entry, (slice, type(...))) for entry in entries):
        return NotImplemented
    if ... in entries:
        at = entries.index(...)
        entries = (*entries[:at], *[slice(None)] * (input.dim() - len(entries) + 1), *entries[at + 1 :])
    if any(dim < len(entries) and entries[dim] != slice(None) for dim in input.dims):
        return NotImplemented
    return input.like(func(input.local, entries))
