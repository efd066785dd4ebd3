"""BatchNorm over the whole batch, however many replicas share it.

Statistics of a part are not those of the batch: with the stock module, two replicas train another model than one
process does. Here every replica contributes count, sum and sum of squares of its part, all get the totals, and
normalize by them; in backward likewise with the two sums that the gradient needs. The sums are a few hundred
numbers through shared memory. They are kept in float64, where forming the variance from them is harmless.

With m, v the mean and variance of the batch, x̂ = (x−m)/√(v+ε) and N samples:

    y  = w·x̂ + b
    dx = w/√(v+ε) · (dy − Σdy/N − x̂·Σ(dy·x̂)/N)        sums over the whole batch

On a CPU the sums are formed over the pixels of an image, which lie side by side, and then over the images. That makes
up for what the exchange costs: torch's own kernels go over the batch channel by channel. What there is a channel is
computed on the host, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from paceline.errors import ModelError
from paceline.memory.channels_last import channels_are_last
from paceline.optim.image_blocks import image_blocks
from paceline.torch_private import AnyBatchNorm, check_input_dims, keep_compiler_out

Sum = Callable[[torch.Tensor], torch.Tensor]
Numbers = npt.NDArray[np.float64]  # of channels


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
            for running, own in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
                running.lerp_(torch.from_numpy(own).to(running.device, running.dtype), momentum)
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
    @np.errstate(all="ignore")  # what is infinite or no number any more is told by the loss
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        total: Sum,
    ) -> tuple[torch.Tensor, Numbers, Numbers, float]:
        channels = x.size(1)
        own_count = x.numel() // channels
        own_mean, own_variance = _mean_and_variance(x)
        mine = np.empty(2 * channels + 1)
        mine[0] = own_count
        mine[1 : channels + 1] = own_mean * own_count
        mine[channels + 1 :] = (own_variance + own_mean * own_mean) * own_count
        sums = _numbers(total(torch.from_numpy(mine)))
        count = float(sums[0])
        if count <= 1:
            raise ValueError("BatchNorm needs more than one value per channel in a batch when training")
        mean = sums[1 : channels + 1] / count
        variance = np.maximum(sums[channels + 1 :] / count - mean * mean, 0)
        normalized = _normalized(x, [weight, bias, *_like(x, weight, mean, variance)], eps)
        ctx.save_for_backward(x, weight)
        ctx.mean, ctx.variance, ctx.eps, ctx.total, ctx.count = mean, variance, eps, total, count
        return normalized, mean, variance, count

    @staticmethod
    @np.errstate(all="ignore")
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        scale = 1 / np.sqrt(ctx.variance + ctx.eps)
        own_dy, own_dy_x = _sums_with(dy, x, ctx.mean)
        own_dy_x *= scale
        sums = _numbers(ctx.total(torch.from_numpy(np.concatenate((own_dy_x, own_dy)))))
        mean_dy_x, mean_dy = (sums / ctx.count).reshape(2, -1)
        gain = scale if weight is None else scale * _numbers(weight)
        # What is taken off w/√(v+ε) · dy is again a normalization of x, with other factors.
        gain_x, *factors = _like(x, weight, gain, -gain * mean_dy_x, -gain * mean_dy, ctx.mean, ctx.variance)
        dx = _normalized_and(dy, gain_x.view(1, -1, *[1] * (x.dim() - 2)), x, factors, ctx.eps)
        if weight is None:
            return dx, None, None, None, None
        return dx, *_like(x, weight, own_dy_x, own_dy), None, None


# ── the numbers of channels: small, of float64, on the host ──────────────────────────────────────────────────


def _numbers(values: torch.Tensor) -> Numbers:
    """One number a channel. Of so few numpy finds in a fraction of the time what torch would."""
    found: Numbers = values.detach().cpu().double().numpy()
    return found


def _like(x: torch.Tensor, weight: torch.Tensor | None, *numbers: Numbers) -> list[torch.Tensor]:
    """Numbers as torch's normalization of x wants its statistics and factors."""
    kept_type = weight.dtype if weight is not None else torch.promote_types(x.dtype, torch.float32)
    return [torch.from_numpy(each).to(x.device, kept_type) for each in numbers]


def _typed(values: Numbers, x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(x.device, torch.promote_types(x.dtype, torch.float32))


# ── sums and lines, a block of images at a time ──────────────────────────────────────────────────────────────


def _sum(x: torch.Tensor) -> Numbers:
    """The sum of every channel: in float32 over what lies side by side, then over the rest."""
    if x.dim() == 2:
        return _numbers(x.sum(0, dtype=torch.float64))
    kept = torch.promote_types(x.dtype, torch.float32)
    found: Numbers = x.flatten(2).sum(2, dtype=kept).cpu().numpy().sum(0, dtype=np.float64)
    return found


def _mean_and_variance(x: torch.Tensor) -> tuple[Numbers, Numbers]:
    """Of every channel. The mean is taken off before squares are summed: nothing cancels."""
    count = x.numel() // x.size(1)
    if x.is_cuda:
        mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
        return _numbers(mean), _numbers(variance)
    own_mean = _sum(x) / count
    shift = _typed(own_mean, x).view(1, -1, *[1] * (x.dim() - 2))
    squares = np.zeros_like(own_mean)
    for block in image_blocks(x):
        squares += _sum((x[block] - shift).square_())
    return own_mean, squares / count


def _sums_with(dy: torch.Tensor, x: torch.Tensor, mean: Numbers) -> tuple[Numbers, Numbers]:
    """Of every channel the sum of dy, and of dy·(x − mean): of what torch's own backward finds, what takes no count."""
    if not x.numel():  # of nothing torch's would divide by it, and end the process
        return np.zeros_like(mean), np.zeros_like(mean)
    own_mean = _typed(mean, x)
    scale = torch.ones_like(own_mean)
    # Of those that lie otherwise it would take one number after the other.
    lies = torch.channels_last if channels_are_last(x) else torch.contiguous_format
    dense = (dy.contiguous(memory_format=lies), x.contiguous(memory_format=lies))
    given = (*dense, scale, None, None, own_mean, scale, True, 0.0)
    _, with_x, alone = torch.ops.aten.native_batch_norm_backward(*given, [False, True, True])
    return _numbers(alone), _numbers(with_x)


def _normalized(x: torch.Tensor, factors: Sequence[torch.Tensor | None], eps: float) -> torch.Tensor:
    """x by weight, bias, mean and variance of its channels."""
    weight, bias, mean, variance = factors
    return torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]


def _normalized_and(
    dy: torch.Tensor, gain: torch.Tensor, x: torch.Tensor, factors: Sequence[torch.Tensor], eps: float
) -> torch.Tensor:
    """The same, and gain·dy."""
    if x.is_cuda or x.dtype not in (torch.float32, torch.float64):
        return (dy * gain).add_(_normalized(x, factors, eps)).to(x.dtype)
    dx, unused = torch.empty_like(x), gain.new_empty(0)
    into = {"save_mean": unused, "save_invstd": unused}
    for block in image_blocks(x):
        own = dx[block]
        torch.ops.aten.native_batch_norm.out(x[block], *factors, False, 0.0, eps, out=own, **into)
        own.addcmul_(dy[block], gain)
    return dx
