"""Products by oneDNN are those of torch, to rounding; what they do not suit is left to torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from paceline import machine
from paceline.optim import direct_gradients, products
from paceline.optim.gradients import GradientCollector, IntoBuffer

CLOSE = {"rtol": 0.0, "atol": 2e-5}  # of numbers of about one, sums of 600 products of such
WIDE = 600  # by 600 is large


@pytest.fixture(autouse=True)
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever processor this is."""
    products._multiply.cache_clear()
    monkeypatch.setattr(machine, "has_wide_instructions_of_amd", lambda: True)
    assert products._multiply() is not None
    yield
    products._multiply.cache_clear()


def rows(*shape: int) -> torch.Tensor:
    torch.manual_seed(len(shape))
    return torch.randn(*shape) / WIDE**0.5


@pytest.mark.parametrize("shape", [(8, WIDE), (33, WIDE), (3, 5, WIDE), (2, 2, 4, WIDE)])
@pytest.mark.parametrize("outputs", [WIDE, 1001, 1 << 12])
@torch.no_grad()
def test_layers_and_gradients_are_those_of_float64(shape: tuple[int, ...], outputs: int) -> None:
    x, weight, bias = rows(*shape), torch.randn(outputs, WIDE), torch.randn(outputs)
    for way in (weight, weight.t().contiguous().t()):
        assert products.suit(x, way)
        found = products.linear(x, way, bias)
        torch.testing.assert_close(found.double(), F.linear(x.double(), way.double(), bias.double()), **CLOSE)
        dy = torch.randn(*shape[:-1], outputs) / outputs**0.5
        torch.testing.assert_close(products.product(dy, way).double(), dy.double() @ way.double(), **CLOSE)
    flat, gradient = x.reshape(-1, WIDE), dy.reshape(-1, outputs)
    expected = gradient.double().t() @ flat.double()
    whole = torch.zeros(outputs, 2 * WIDE)
    for place in (torch.full((outputs, WIDE), 7.0), whole[:, :WIDE]):
        products.add_gradient(place, gradient.t(), flat, replace=True)
        torch.testing.assert_close(place.double(), expected, **CLOSE)
        products.add_gradient(place, gradient.t(), flat, replace=False)
        torch.testing.assert_close(place.double(), 2 * expected, **CLOSE)
    assert not whole[:, WIDE:].any()


LARGE = torch.randn(WIDE, WIDE)
LEFT_TO_TORCH = {
    "few rows": (rows(7, WIDE), LARGE),
    "a small matrix": (rows(64, 100), torch.randn(100, 100)),
    "float64": (rows(16, WIDE).double(), LARGE.double()),
    "columns of a larger matrix": (rows(16, WIDE), torch.randn(WIDE, 2 * WIDE)[:, :WIDE]),  # oneDNN takes a second
    "rows that do not follow one another": (rows(16, 2 * WIDE)[:, ::2], LARGE),
    "the same row again and again": (rows(1, WIDE).expand(16, WIDE), LARGE),
}


@pytest.mark.parametrize(("x", "weight"), LEFT_TO_TORCH.values(), ids=LEFT_TO_TORCH)
@torch.no_grad()
def test_what_they_do_not_suit_is_torchs_own(x: torch.Tensor, weight: torch.Tensor) -> None:
    assert not products.suit(x, weight)
    assert torch.equal(products.linear(x, weight, None), F.linear(x, weight))
    assert torch.equal(products.product(x, weight.t()), x @ weight.t())
    place = torch.empty(weight.size(0), x.size(1), dtype=x.dtype)
    other = x[:, : weight.size(0)]
    products.add_gradient(place[: other.size(1)], other.t(), x, replace=True)
    torch.testing.assert_close(place[: other.size(1)], other.t() @ x, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_sizes_that_do_not_fit_are_told_by_torch() -> None:
    for call in (
        lambda: products.linear(rows(16, 500), LARGE, None),
        lambda: products.product(rows(16, 500), LARGE),
        lambda: products.gradient(rows(20, WIDE).t(), rows(16, WIDE)),
    ):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            call()
    bias = torch.ones(1)  # for all
    torch.testing.assert_close(products.linear(rows(16, WIDE), LARGE, bias), F.linear(rows(16, WIDE), LARGE) + 1)


def test_gradients_of_several_at_once_and_of_none_are_torchs_own() -> None:
    """`is_grads_batched` has one tensor stand for several; a weight of which no gradient is wanted gets none."""
    model, x = Net(), rows(16, WIDE).requires_grad_()
    model.again.weight.requires_grad_(False)
    token = object()
    direct_gradients.begin(token)
    try:
        y = model(x, direct_gradients.addmm)
        several = torch.randn(3, *y.shape)
        (found,) = torch.autograd.grad(y, model.first.weight, several, is_grads_batched=True, retain_graph=True)
        y.sum().backward(inputs=[x])
    finally:
        direct_gradients.end(token)
    (expected,) = torch.autograd.grad(model(x), model.first.weight, several, is_grads_batched=True)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert x.grad is not None


def test_with_autocast_and_where_autograd_looks_they_are_torchs_own() -> None:
    x, weight = rows(16, WIDE), nn.Parameter(LARGE.clone())
    assert products.linear(x, weight, None).grad_fn is not None
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert products.linear(x, weight, None).dtype == torch.bfloat16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE, bias=False)
        self.other_way = nn.Parameter(torch.randn(WIDE, WIDE) / WIDE)
        self.bias = nn.Parameter(torch.zeros(WIDE))

    def forward(self, x: torch.Tensor, added: Callable[..., torch.Tensor] = torch.addmm) -> torch.Tensor:
        x = self.again(F.gelu(self.again(F.gelu(self.first(x)))))
        return added(self.bias, x, self.other_way)


@pytest.mark.parametrize("in_place", [True, False], ids=["gradients in place", "gradients the usual way"])
def test_a_step_gives_the_gradients_of_float64(in_place: bool) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(16, WIDE)
    exact = Net().double()
    exact.load_state_dict(model.state_dict())
    exact(x.double()).square().mean().backward()
    parameters = list(model.parameters())
    places = [torch.empty_like(parameter) for parameter in parameters]
    collector = GradientCollector(
        parameters, [IntoBuffer(place) for place in places], None if in_place else lambda slot: None
    )
    with collector.step(), profile(activities=[ProfilerActivity.CPU]) as seen:
        model(x, direct_gradients.addmm).square().mean().backward()
    collector.finish()
    (times,) = [event.count for event in seen.key_averages() if event.key == "mkldnn::_linear_pointwise"]
    assert times == 4 + 3 + 4  # products forward, for what went in but for the first, and for weights
    collector.close()
    for place, parameter in zip(places, exact.parameters(), strict=True):
        torch.testing.assert_close(place.double(), parameter.grad, rtol=1e-4, atol=1e-8)


def test_a_gradient_of_a_gradient_is_there() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(16, WIDE, requires_grad=True)
    found = []
    for kind in (torch.float64, torch.float32):
        model, x = model.to(kind), x.detach().to(kind).requires_grad_()
        model.zero_grad()
        token = object()
        direct_gradients.begin(token)
        try:
            (slope,) = torch.autograd.grad(model(x, direct_gradients.addmm).square().sum(), x, create_graph=True)
            slope.square().sum().backward()
        finally:
            direct_gradients.end(token)
        assert model.first.weight.grad is not None
        found.append(model.first.weight.grad.clone().double())
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-5)


def test_who_wants_plain_torch_gets_it() -> None:
    code = "from paceline.optim import products; print(products._multiply())"
    environment = {**os.environ, "PACELINE_PLAIN_TORCH": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
