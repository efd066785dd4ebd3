"""BatchNorm over the whole batch, however many replicas share it.

Statistics of a part are not those of the batch: with the stock module, two replicas train another model than one
process does. Here every replica contributes count, sum and sum of squares of its part, all get the totals, and
normalize by them; in backward likewise with the two sums that the gradient needs. The sums are a few hundred
numbers through shared memory. They are kept in float64, where forming the variance from them is harmless.

With m, v the mean and variance of the batch, x̂ = (x−m)/√(v+ε) and N samples:

    y  = w·x̂ + b
    dx = w/√(v+ε) · (dy − Σdy/N − x̂·Σ(dy·x̂)/N)        sums over the whole batch

On a CPU the sums are formed over the pixels of an image, which lie side by side, and then over the images. That takes a
tenth of the time of torch's own kernels, which go over the batch channel by channel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Sum = Callable[[torch.Tensor], torch.Tensor]


class Statistics:
    """How batch statistics are added up at this moment; None: torch's own module does it."""

    def __init__(self) -> None:
        self.sum: Sum | None = None


def own(values: torch.Tensor) -> torch.Tensor:
    """Statistics of one replica's part only."""
    return values


def has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def make_exact(model: nn.Module, statistics: Statistics) -> Callable[[], None]:
    """Let every BatchNorm of `model` use statistics over all parts. Returns what undoes it."""
    changed: list[tuple[_BatchNorm, type[_BatchNorm]]] = []
    for module in model.modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            changed.append((module, type(module)))
            module.__class__ = _exact_kind(type(module))
            module._statistics = statistics  # type: ignore[assignment]

    def undo() -> None:
        for module, kind in changed:
            module.__class__ = kind
            del module._statistics

    return undo


def _exact_kind(kind: type[_BatchNorm]) -> type[_BatchNorm]:
    """`kind` with another forward: same name, same parameters, same state_dict."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        total = self._statistics.sum
        if not self.training or total is None or (total is own and torch.compiler.is_compiling()):
            output: torch.Tensor = kind.forward(self, x)
            return output
        exact: torch.Tensor = _exact_forward(self, x, total)
        return exact

    return type(kind.__name__, (kind,), {"forward": forward})


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _exact_forward(module: _BatchNorm, x: torch.Tensor, total: Sum) -> torch.Tensor:
    module._check_input_dim(x)  # type: ignore[no-untyped-call]
    normalized, mean, variance, count = _ExactBatchNorm.apply(  # type: ignore[no-untyped-call]
        x, module.weight, module.bias, module.eps, total
    )
    if module.track_running_stats:
        assert module.num_batches_tracked is not None
        assert module.running_mean is not None
        assert module.running_var is not None
        module.num_batches_tracked.add_(1)
        momentum = module.momentum if module.momentum is not None else 1 / float(module.num_batches_tracked)
        module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
        unbiased = variance * (count / (count - 1))
        module.running_var.lerp_(unbiased.to(module.running_var.dtype), momentum)
    return normalized  # type: ignore[no-any-return]


class _ExactBatchNorm(torch.autograd.Function):
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
        sums = total(mine)
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
        shape = [1, -1, *[1] * (x.dim() - 2)]
        invstd = (variance.double() + ctx.eps).rsqrt()
        gain = invstd if weight is None else invstd * weight.double()
        centered = x - mean.to(x.dtype).view(shape)
        own_dy, own_dy_x = _sum(dy), _sum(dy * centered) * invstd
        mean_dy_x, mean_dy = (ctx.total(torch.cat([own_dy_x, own_dy])) / ctx.count).chunk(2)

        def over(values: torch.Tensor) -> torch.Tensor:
            return values.to(x.dtype).view(shape)

        dx = centered.mul_(over(-gain * invstd * mean_dy_x)).addcmul_(dy, over(gain)).sub_(over(gain * mean_dy))
        if weight is None:
            return dx, None, None, None, None
        return dx, own_dy_x.to(weight.dtype), own_dy.to(weight.dtype), None, None


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
    kept = torch.promote_types(x.dtype, torch.float32)
    mean = _sum(x) / count
    shape = [1, -1, *[1] * (x.dim() - 2)]
    centered = x.to(kept) - mean.to(kept).view(shape)
    return mean, _sum(centered.square_()) / count
