"""BatchNorm over parts is stock BatchNorm over the whole batch: outputs, gradients, running statistics."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import ModelError
from paceline.optim.batchnorm import Statistics, _sums_with, make_exact


class Meeting:
    """Adds up what two or more threads bring, each sum when all have come: the exchange, by hand."""

    def __init__(self, parts: int) -> None:
        self._values: list[torch.Tensor | None] = [None] * parts
        self._barrier = threading.Barrier(parts, timeout=20)

    def sum_for(self, part: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def total(values: torch.Tensor) -> torch.Tensor:
            self._values[part] = values
            self._barrier.wait()
            result = sum(value for value in self._values if value is not None)
            self._barrier.wait()
            assert isinstance(result, torch.Tensor)
            return result

        return total


def train_in_parts(model: nn.Module, parts: list[torch.Tensor], steps: int) -> list[dict[str, Any]]:
    """Each thread has its own copy of the model and its part of the batch; what it ends with."""
    meeting = Meeting(len(parts))

    def work(index: int) -> dict[str, Any]:
        own, statistics = copy.deepcopy(model), Statistics()
        undo = make_exact(own, statistics)
        statistics.sum = meeting.sum_for(index)
        for _ in range(steps):
            own.zero_grad()
            x = parts[index].clone().requires_grad_()
            y = own(x)
            loss_of(y, sum(map(len, parts))).backward()
        undo()
        assert type(own) is type(model)
        gradients = {name: parameter.grad for name, parameter in own.named_parameters()}
        return {"y": y.detach(), "dx": x.grad, "gradients": gradients, "buffers": dict(own.named_buffers())}

    with ThreadPoolExecutor(len(parts)) as threads:
        return list(threads.map(work, range(len(parts)), timeout=30))


def loss_of(y: torch.Tensor, samples: int) -> torch.Tensor:
    """Something whose gradient differs from element to element."""
    weights = torch.linspace(-1, 1, y[0].numel(), dtype=y.dtype).view(y.shape[1:])
    return (y.square() * y * weights + y * weights.sin()).sum() / samples


class Activated(nn.BatchNorm2d):
    """Its forward is its own, as that of timm's BatchNormAct2d: it ends with the activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        if self.training:
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return F.silu(x, inplace=True)


class Doubled(nn.BatchNorm1d):
    """Its forward is torch's own, and more; a part of the values stays as it was."""

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        frozen = F.batch_norm(x, *(buffer.clone() for buffer in list(self.buffers())[:2]), eps=self.eps)
        return super().forward(x) * scale + 0.1 * frozen


class Direct(nn.BatchNorm2d):
    """Calls the operator itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.momentum is not None
        statistics = (self.weight, self.bias, self.running_mean, self.running_var)
        return torch.batch_norm(x, *statistics, self.training, self.momentum, eps=self.eps, cudnn_enabled=False)


class Native(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_batch_norm(x, None, None, None, None, self.training, 0.1, self.eps)[0]


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(5), (5,)),
    "1d, sequences": (lambda: nn.BatchNorm1d(5), (5, 7)),
    "2d": (lambda: nn.BatchNorm2d(5), (5, 4, 3)),
    "3d": (lambda: nn.BatchNorm3d(5), (5, 2, 3, 2)),
    "not affine": (lambda: nn.BatchNorm2d(5, affine=False), (5, 4, 3)),
    "average over all batches": (lambda: nn.BatchNorm2d(5, momentum=None), (5, 4, 3)),
    "no running statistics": (lambda: nn.BatchNorm2d(5, track_running_stats=False), (5, 4, 3)),
    "other eps and momentum": (lambda: nn.BatchNorm1d(5, eps=0.1, momentum=0.4), (5,)),
    "fp64": (lambda: nn.BatchNorm2d(5).double(), (5, 4, 3)),
    "fp64, not affine": (lambda: nn.BatchNorm2d(5, affine=False).double(), (5, 4, 3)),
    "fp64, a forward of its own": (lambda: Activated(5).double(), (5, 4, 3)),
    "fp64, the operator itself": (lambda: Direct(5).double(), (5, 4, 3)),
    "fp64, more than torch's forward": (lambda: Doubled(5, momentum=None).double(), (5,)),
}


@pytest.mark.parametrize("sizes", [(6, 6), (7, 2), (1, 4, 3)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_parts_give_what_stock_batchnorm_gives_for_the_whole(case: str, sizes: tuple[int, ...]) -> None:
    make, shape = CASES[case]
    model = make()
    dtype = torch.float64 if case.startswith("fp64") else torch.float32
    generator = torch.Generator().manual_seed(0)
    # A mean far from 0: a variance from sums of squares in fp32 would lose its digits.
    whole = torch.randn(sum(sizes), *shape, generator=generator, dtype=dtype) * 3 + 20
    for parameter in model.parameters():
        parameter.data.uniform_(0.5, 2.0, generator=generator)
    ends = train_in_parts(model, list(whole.split(sizes)), steps=3)

    for _ in range(3):
        model.zero_grad()
        x = whole.clone().requires_grad_()
        y = model(x)
        loss_of(y, len(whole)).backward()
    assert x.grad is not None
    exactness = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.cat([end["y"] for end in ends]), y.detach(), **exactness)
    torch.testing.assert_close(torch.cat([end["dx"] for end in ends]), x.grad, **exactness)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(sum(end["gradients"][name] for end in ends), parameter.grad, **exactness)
    for name, buffer in model.named_buffers():
        for end in ends:
            torch.testing.assert_close(end["buffers"][name], buffer, **exactness)
            assert torch.equal(end["buffers"][name], ends[0]["buffers"][name])


def test_bf16_input_with_fp32_parameters_as_under_autocast() -> None:
    model = nn.BatchNorm2d(3)
    whole = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    ends = train_in_parts(model, list(whole.split((5, 3))), steps=1)
    x = whole.clone().requires_grad_()
    y = model(x)
    loss_of(y, len(whole)).backward()
    assert x.grad is not None
    assert ends[0]["y"].dtype == y.dtype
    torch.testing.assert_close(torch.cat([end["y"] for end in ends]), y.detach(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(torch.cat([end["dx"] for end in ends]), x.grad, rtol=2e-2, atol=2e-2)


def test_the_module_keeps_its_name_and_its_state_dict() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3))
    keys, text = list(model.state_dict()), str(model)
    undo = make_exact(model, Statistics())
    assert (list(model.state_dict()), str(model)) == (keys, text)
    assert isinstance(model[1], nn.BatchNorm2d)
    undo()
    assert type(model[1]) is nn.BatchNorm2d


def test_evaluation_does_not_meet_anybody() -> None:
    model = nn.BatchNorm1d(3)
    statistics = Statistics()
    make_exact(model, statistics)

    def never(values: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nobody else is evaluating this batch")

    statistics.sum = never
    assert torch.allclose(model.eval()(torch.ones(2, 3)), torch.ones(2, 3), atol=1e-4)


def test_a_single_value_per_channel_has_no_variance() -> None:
    model, statistics = nn.BatchNorm1d(3), Statistics()
    make_exact(model, statistics)
    statistics.sum = lambda values: values
    with pytest.raises(ValueError, match="more than one value per channel"):
        model(torch.ones(1, 3))


def test_a_forward_that_asks_for_the_statistics_of_its_part_is_refused() -> None:
    model, statistics = Native(3), Statistics()
    make_exact(model, statistics)
    assert model(torch.ones(2, 3, 1, 1)).shape == (2, 3, 1, 1)
    statistics.sum = lambda values: values
    with pytest.raises(ModelError, match=r"model is 'native_batch_norm': .* or give --batchnorm local"):
        model(torch.ones(2, 3, 1, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lies", ["planes", "channels last", "gradient otherwise", "gradient of one number", "rows"])
@pytest.mark.parametrize("shape", [(16, 5), (8, 5, 7), (4, 5, 6, 7), (2, 5, 3, 4, 5), (1, 1, 3, 3), (0, 5, 3, 3)])
def test_sums_of_a_gradient_are_right_however_tensors_lie(
    dtype: torch.dtype, lies: str, shape: tuple[int, ...]
) -> None:
    x, dy = (3 + torch.randn(2, *shape, dtype=torch.float64)).to(dtype)
    if len(shape) == 4 and lies in ("channels last", "gradient otherwise"):
        dy = dy.contiguous(memory_format=torch.channels_last)
        x = x if lies == "gradient otherwise" else x.contiguous(memory_format=torch.channels_last)
    if lies == "gradient of one number":
        dy = dy.flatten()[:1].sum().expand(shape)
    if lies == "rows" and len(shape) > 2:
        x = x.repeat_interleave(2, -1)[..., ::2]
    mean = torch.linspace(2, 4, shape[1], dtype=torch.float64).to(dtype).double()
    others = [dim for dim in range(len(shape)) if dim != 1]
    centred = x.double() - mean.view(1, -1, *[1] * (len(shape) - 2))
    alone, with_x = (torch.from_numpy(found) for found in _sums_with(dy, x, mean.numpy()))
    tolerance = 1e-12 if dtype is torch.float64 else 1e-5
    torch.testing.assert_close(alone, dy.double().sum(others), rtol=tolerance, atol=10 * tolerance)
    torch.testing.assert_close(with_x, (dy.double() * centred).sum(others), rtol=tolerance, atol=100 * tolerance)
