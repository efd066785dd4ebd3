"""BatchNorm over the whole batch, however many replicas share it.

Statistics of a part are not those of the batch: with the stock module, two replicas train another model than one
process does. Here every replica contributes count, sum and sum of squares of its part, all get the totals, and
normalize by them; in backward likewise with the two sums that the gradient needs. The sums are a few hundred
numbers through shared memory. They are kept in float64, where forming the variance from them is harmless.

With m, v the mean and variance of the batch, x̂ = (x−m)/√(v+ε) and N samples:

    y  = w·x̂ + b
    dx = w/√(v+ε) · (dy − Σdy/N − x̂·Σ(dy·x̂)/N)        sums over the whole batch

On a CPU the sums are formed over the pixels of an image, which lie side by side, and then over the images. That makes
up for what the exchange costs: torch's own kernels go over the batch channel by channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from paceline.errors import ModelError
from paceline.optim.image_blocks import image_blocks
from paceline.torch_private import AnyBatchNorm, check_input_dims, keep_compiler_out

Sum = Callable[[torch.Tensor], torch.Tensor]


class Statistics:
    """How batch statistics are added up at this moment; None: torch's own module does it."""

    def __init__(self) -> None:
        self.sum: Sum | None = None


def has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(module, AnyBatchNorm) for module in model.modules())


def make_exact(model: nn.Module, statistics: Statistics) -> Callable[[], None]:
    """Let every BatchNorm of `model` use statistics over all parts. Returns what undoes it.

    A cut may give some of them another `_statistics`."""
    changed: list[tuple[AnyBatchNorm, type[AnyBatchNorm]]] = []
    for module in model.modules():
        if isinstance(module, AnyBatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            changed.append((module, type(module)))
            module.__class__ = _exact_kind(type(module))
            module._statistics = statistics  # type: ignore[assignment]

    def undo() -> None:
        for module, kind in changed:
            module.__class__ = kind
            del module._statistics

    return undo


def _exact_kind(kind: type[AnyBatchNorm]) -> type[AnyBatchNorm]:
    """`kind` with another forward: same name, same parameters, same state_dict."""
    if kind.forward is not AnyBatchNorm.forward:
        return _exact_kind_of_own(kind)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        total = self._statistics.sum
        if not self.training or total is None:
            output: torch.Tensor = kind.forward(self, x)
            return output
        # To make it known to the compiler is to load the compiler: a second, for those who do not use it.
        run = _uncompiled_forward if torch.compiler.is_compiling() else _exact_forward
        exact: torch.Tensor = run(self, x, total)
        return exact

    return type(kind.__name__, (kind,), {"forward": forward})


def _exact_forward(module: AnyBatchNorm, x: torch.Tensor, total: Sum) -> torch.Tensor:
    check_input_dims(module, x)
    momentum = module.momentum
    if module.track_running_stats:
        assert module.num_batches_tracked is not None
        module.num_batches_tracked.add_(1)
        momentum = momentum if momentum is not None else 1 / float(module.num_batches_tracked)
    return exact_batch_norm(
        x, module.weight, module.bias, module.running_mean, module.running_var, momentum or 0.0, module.eps, total
    )


def exact_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    total: Sum,
) -> torch.Tensor:
    """What `F.batch_norm` does in training, with statistics over all parts."""
    normalized, mean, variance, count = ExactBatchNorm.apply(x, weight, bias, eps, total)  # type: ignore[no-untyped-call]
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)
    return normalized  # type: ignore[no-any-return]


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    statistics: Statistics | None,
) -> torch.Tensor:
    """Normalizes channels, over all replicas where their statistics are added up."""
    if training and statistics is not None and statistics.sum is not None:
        return exact_batch_norm(x, weight, bias, mean, variance, momentum, eps, statistics.sum)
    return F.batch_norm(x, mean, variance, weight, bias, training, momentum, eps)


def statistics_of(model: nn.Module) -> dict[str, Statistics]:
    """How the statistics of each BatchNorm are added up, by the module's name."""
    found = ((name, getattr(module, "_statistics", None)) for name, module in model.named_modules())
    return {name: statistics for name, statistics in found if isinstance(statistics, Statistics)}


@contextmanager
def plain_batchnorm(model: nn.Module) -> Iterator[None]:
    """BatchNorms are torch's own meanwhile."""
    kept = [(statistics, statistics.sum) for statistics in statistics_of(model).values()]
    for statistics, _ in kept:
        statistics.sum = None
    try:
        yield
    finally:
        for statistics, total in reversed(kept):
            statistics.sum = total


_uncompiled_forward = keep_compiler_out(_exact_forward)


# ── a user's own forward ─────────────────────────────────────────────────────────────────────────────────────


def _exact_kind_of_own(kind: type[AnyBatchNorm]) -> type[AnyBatchNorm]:
    """A subclass may do more in its forward, apply its activation say: it runs as it is, and only what it has
    `F.batch_norm` or `torch.batch_norm` do is exact."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        total = self._statistics.sum
        if not self.training or total is None:
            return kind.forward(self, *args, **kwargs)
        run = _uncompiled_own_forward if torch.compiler.is_compiling() else _own_forward
        return run(kind, self, args, kwargs, total)

    return type(kind.__name__, (kind,), {"forward": forward})


def _own_forward(kind: type[AnyBatchNorm], module: Any, args: Any, kwargs: Any, total: Sum) -> Any:
    with _OverAllParts(total):
        return kind.forward(module, *args, **kwargs)


_uncompiled_own_forward = keep_compiler_out(_own_forward)


# What has batch statistics among its results, of which a caller may make anything.
_WITH_STATISTICS = (torch.native_batch_norm, torch.batch_norm_stats, torch.batch_norm_update_stats)


class _OverAllParts(TorchFunctionMode):
    """Inside, a batch norm by the statistics of a batch is one by those of all parts."""

    def __init__(self, total: Sum) -> None:
        super().__init__()
        self._total = total

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is F.batch_norm:
            return self._batch_norm(*args, **given)
        if func is torch.batch_norm:
            return self._operator(*args, **given)
        if func in _WITH_STATISTICS:
            raise ModelError(
                "model",
                func.__name__,
                "statistics of a part are not those of the batch: call F.batch_norm, or give --batchnorm local",
            )
        return func(*args, **given)

    def _operator(
        self,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> torch.Tensor:
        """What `F.batch_norm` calls, which is in another order."""
        return self._batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)

    def _batch_norm(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        return exact_batch_norm(input, weight, bias, running_mean, running_var, momentum, eps, self._total)


class ExactBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        total: Sum,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
        channels = x.size(1)
        own_count = x.numel() // channels
        own_mean, own_variance = _mean_and_variance(x)
        mine = torch.empty(2 * channels + 1, dtype=torch.float64)
        mine[0] = own_count
        mine[1 : channels + 1] = own_mean * own_count
        mine[channels + 1 :] = (own_variance + own_mean.square()) * own_count
        sums = total(mine).to(x.device)
        count = float(sums[0])
        if count <= 1:
            raise ValueError("BatchNorm needs more than one value per channel in a batch when training")
        mean = sums[1 : channels + 1] / count
        variance = (sums[channels + 1 :] / count - mean.square()).clamp_(min=0)
        kept_type = weight.dtype if weight is not None else torch.promote_types(x.dtype, torch.float32)
        mean_x, variance_x = mean.to(kept_type), variance.to(kept_type)
        normalized = torch.native_batch_norm(x, weight, bias, mean_x, variance_x, False, 0.0, eps)[0]
        ctx.save_for_backward(x, weight, mean_x, variance_x)
        ctx.eps, ctx.total, ctx.count = eps, total, count
        ctx.mark_non_differentiable(mean, variance)
        return normalized, mean, variance, count

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        invstd = (variance.double() + ctx.eps).rsqrt()
        gain = invstd if weight is None else invstd * weight.double()
        own_dy, own_dy_x = _sums_with(dy, x, mean)
        own_dy_x *= invstd
        mean_dy_x, mean_dy = (ctx.total(torch.cat([own_dy_x, own_dy])) / ctx.count).chunk(2)
        slope = -gain * invstd * mean_dy_x
        dx = _straight_lines(dy, gain, x, slope, -gain * mean_dy - slope * mean.double())
        if weight is None:
            return dx, None, None, None, None
        return dx, own_dy_x.to(weight.dtype), own_dy.to(weight.dtype), None, None


# ── sums and lines, a block of images at a time ──────────────────────────────────────────────────────────────


def _per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values.to(torch.promote_types(x.dtype, torch.float32)).view(1, -1, *[1] * (x.dim() - 2))


def _sum(x: torch.Tensor) -> torch.Tensor:
    """The sum of every channel, in float64: in float32 over what lies side by side, then over the rest."""
    if x.dim() == 2:
        return x.sum(0, dtype=torch.float64)
    kept = torch.promote_types(x.dtype, torch.float32)
    return x.flatten(2).sum(2, dtype=kept).sum(0, dtype=torch.float64)


def _mean_and_variance(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every channel, in float64. The mean is taken off before squares are summed: nothing cancels."""
    count = x.numel() // x.size(1)
    if x.is_cuda:
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
        return mean.double(), variance.double()
    mean = _sum(x) / count
    shift = _per_channel(mean, x)
    squares = torch.zeros_like(mean)
    for block in image_blocks(x):
        squares += _sum((x[block] - shift).square_())
    return mean, squares / count


def _sums_with(dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every channel the sum of dy, and of dy·(x − mean)."""
    shift = _per_channel(mean, x)
    products = torch.zeros(x.size(1), dtype=torch.float64, device=x.device)
    for block in image_blocks(x):
        products += _sum((x[block] - shift).mul_(dy[block]))
    return _sum(dy), products


def _straight_lines(
    dy: torch.Tensor, gain: torch.Tensor, x: torch.Tensor, slope: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """gain·dy + slope·x + offset, channel by channel."""
    factors = [_per_channel(values, x) for values in (gain, slope, offset)]
    if x.dtype in (torch.float32, torch.float64):
        dx = torch.empty_like(x)
        for block in image_blocks(x):
            torch.mul(dy[block], factors[0], out=dx[block]).addcmul_(x[block], factors[1]).add_(factors[2])
        return dx
    return (dy * factors[0]).addcmul_(x.to(factors[1].dtype), factors[1]).add_(factors[2]).to(x.dtype)
