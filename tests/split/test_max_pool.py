"""Pooling with channels side by side is torch's pooling: the same bits, ties and numbers that are none included."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from paceline.split.tiles.max_pool import LEAST_CHANNELS, MaxPool
from paceline.split.tiles.needed_rows import sliding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [LEAST_CHANNELS - 1, LEAST_CHANNELS, 40])
@pytest.mark.parametrize(
    ("kernels", "strides", "padding", "dilations", "ceil"),
    [
        ((3, 3), (2, 2), (0, 1), (1, 1), False),
        ((2, 3), (2, 1), (1, 0), (1, 1), True),
        ((2, 2), (1, 2), (0, 0), (2, 1), False),
    ],
)
def test_values_and_gradients_are_torchs_bit_by_bit(
    dtype: torch.dtype,
    channels: int,
    kernels: tuple[int, int],
    strides: tuple[int, int],
    padding: tuple[int, int],
    dilations: tuple[int, int],
    ceil: bool,
) -> None:
    torch.manual_seed(0)
    numbers = torch.randint(-2, 2, (5, channels, 130, 90)).to(dtype)  # most windows have several highest ones
    numbers[0, 0, 3, 4], numbers[1, 1, :4] = math.nan, -math.inf
    how = MaxPool(kernels, strides, padding, dilations, ceil)
    ours, gradient = pooled(numbers, lambda x: how.run(F.max_pool2d, x))
    theirs, expected = pooled(numbers, lambda x: F.max_pool2d(x, kernels, strides, padding, dilations, ceil))
    assert ours.is_contiguous()
    assert torch.equal(ours.nan_to_num(9), theirs.nan_to_num(9))
    assert torch.equal(gradient, expected)


def pooled(numbers: torch.Tensor, pool: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    x = numbers.clone().requires_grad_()
    y = pool(x)
    (gradient,) = torch.autograd.grad(y, x, torch.arange(y.numel(), dtype=y.dtype).view(y.shape))
    return y.detach(), gradient


def test_the_input_is_not_kept_for_backward() -> None:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)), lambda _: None):
        x = torch.randn(2, 32, 8, 8, requires_grad=True)
        MaxPool((2, 2), (2, 2), (0, 0), (1, 1), False).run(F.max_pool2d, x)
    assert kept == [(2, 32, 4, 4)]


def test_a_stride_that_ends_before_the_last_row_moves_nothing() -> None:
    """A 1×1 convolution with strides of two reads every other row, and is given all: a copy without the last would take
    longer. Rounded up, such rows would be one more of the output."""
    assert sliding(56, 28, 2, 1, 2, 0, 1).nothing_moves
    assert sliding(56, 28, 2, 1, 2, 0, 1, exactly=True).need == ((0, 27), (28, 55))
    assert sliding(56, 28, 2, 3, 2, 1, 1).need == ((0, 28), (27, 56))  # the last row is needed, and one more before
