"""A gradient that a linear layer computes where it goes is the one that would have been copied there."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from paceline.optim import direct_gradients as products
from paceline.optim.gradients import GradientCollector, IntoBuffer
from paceline.optim.postponed import Postponed
from paceline.split.tiles.convolution import Convolution, convolved

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(products, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(products, "LEAST_OF_CONVOLUTION", 1)
    plain = F.linear, F.embedding
    yield
    assert (F.linear, F.embedding) == plain


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slots whose gradients were computed where they go."""
    found: list[int] = []
    write = GradientCollector.write_product

    def count(self: GradientCollector, slot: int, one: torch.Tensor, other: torch.Tensor) -> None:
        found.append(slot)
        write(self, slot, one, other)

    monkeypatch.setattr(GradientCollector, "write_product", count)
    return found


class Twice(nn.Module):
    """Uses a weight twice, and has one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.unused = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(self.first(x))))  # type: ignore[no-any-return]


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()  # type: ignore[no-any-return]


def collected(model: nn.Module, loss: Loss, inputs: list[torch.Tensor]) -> None:
    """What lands for every parameter is what plain torch finds for it, and nothing else is left behind."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    for x in inputs:
        loss(model, x).backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
    used = [p.grad is not None for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    places = [torch.full_like(parameter, 7.0) for parameter in parameters]
    collector = GradientCollector(parameters, list(map(IntoBuffer, places)))
    collector.begin()
    for x in inputs:
        loss(model, x).backward()
    pickle.dumps(model)  # a model can be saved as a whole while it is trained
    assert collector.finish() == used
    for name, place, wanted in zip(names, places, expected, strict=True):
        torch.testing.assert_close(place, wanted, msg=lambda text, name=name: f"{name}: {text}")
    assert all(parameter.grad is None for parameter in parameters)
    collector.close()
    assert all(products.writer_of(parameter) is None for parameter in parameters)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (0, 5)])
@pytest.mark.parametrize("passes", [1, 3])
def test_what_is_used_twice_in_each_of_several_passes_adds_up(
    passes: int, shape: tuple[int, ...], counted: list[int]
) -> None:
    collected(Twice(), plain, [torch.randn(shape) for _ in range(passes)])
    assert sorted(counted) == [0] * 2 * passes + [2] * passes


def test_numbers_are_torchs_own_to_the_last_bit() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(300, 200), torch.randn(4, 16, 300, requires_grad=True)
    plain(layer, x).backward()
    assert layer.weight.grad is not None
    expected = [layer(x).detach(), x.grad, layer.weight.grad.clone(), layer.bias.grad]
    layer.weight.grad = layer.bias.grad = x.grad = None
    places = [torch.zeros_like(parameter) for parameter in layer.parameters()]
    collector = GradientCollector(list(layer.parameters()), list(map(IntoBuffer, places)))
    collector.begin()
    y = layer(x)
    y.square().sum().backward()
    collector.finish()
    collector.close()
    for found, wanted in zip([y.detach(), x.grad, *places], expected, strict=True):
        assert torch.equal(found, wanted)


class Words(nn.Module):
    """A table that is used twice as such, and once as a linear layer; one with padding; and an `addmm`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(7, 5)
        self.padded = nn.Embedding(4, 5, padding_idx=-1)
        self.weight, self.bias = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(6))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.words(numbers) * self.words(numbers.flip(0)) + self.padded(numbers % 4)
        y = products.addmm(self.bias, x.reshape(-1, 5), self.weight)
        return F.linear(y[:, :5], self.words.weight)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("shape", [(6,), (2, 6), (0,)])
def test_rows_of_a_table_and_what_it_is_multiplied_by_add_up(
    passes: int, shape: tuple[int, ...], counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    write = GradientCollector.write_rows

    def count(self: GradientCollector, slot: int, numbers: torch.Tensor, found: torch.Tensor) -> None:
        rows.append(slot)
        write(self, slot, numbers, found)

    monkeypatch.setattr(GradientCollector, "write_rows", count)
    collected(Words(), plain, [torch.randint(7, shape) for _ in range(passes)])
    assert sorted(counted) == [0] * passes + [2] * passes
    assert sorted(rows) == [2] * 2 * passes + [3] * passes


def test_products_that_wait_for_a_weight_are_one_and_the_oldest_do_not_wait_for_long(counted: list[int]) -> None:
    layer, place = nn.Linear(5, 5, bias=False), torch.full((5, 5), 7.0)
    x = torch.randn(4, 3, 5)
    plain(layer, x).backward()
    assert layer.weight.grad is not None
    expected = layer.weight.grad.clone()
    collector = GradientCollector([layer.weight], [IntoBuffer(place)])
    later = Postponed()
    with collector.step():
        for part in x:
            loss = plain(layer, part)
            with later.backward(most_backwards=2):
                loss.backward()
            if part is x[0]:
                assert torch.equal(place, torch.full((5, 5), 7.0))
        assert (len(counted), [product.backward for product in later._waiting]) == (1, [3])
        later.do_all()
    assert len(counted) == 2
    assert collector.finish() == [True]
    collector.close()
    torch.testing.assert_close(place, expected)


def test_gradients_of_convolutions_wait_few_at_a_time() -> None:
    layers = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1, bias=False) for _ in range(4))).double()
    weights = list(layers.parameters())
    places = [torch.full_like(weight, 7.0) for weight in weights]
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    expected = torch.autograd.grad(plain(layers, x), weights)
    collector = GradientCollector(weights, list(map(IntoBuffer, places)))
    how = Convolution((1, 1), (1, 1), (1, 1), 1)

    def waiting() -> list[bool]:
        return [bool((place == 7.0).all()) for place in places]

    later = Postponed(2)
    with collector.step():
        y = x
        for weight in weights:
            y = convolved(F.conv2d, y, weight, None, how)
        with later.backward():
            y.square().sum().backward()
        assert waiting() == [True, True, False, False]  # from the last on they were left, and two may wait
        assert later.do_one()
        assert waiting() == [True, False, False, False]
        later.do_all()
    assert collector.finish() == [True] * 4
    collector.close()
    for place, wanted in zip(places, expected, strict=True):
        torch.testing.assert_close(place, wanted)


def test_what_waits_of_a_backward_that_fails_is_done_by_nobody() -> None:
    layer, place = nn.Linear(5, 5, bias=False), torch.full((5, 5), 7.0)
    collector = GradientCollector([layer.weight], [IntoBuffer(place)])
    later = Postponed()

    def fails() -> None:
        with collector.step(), later.backward():
            plain(layer, torch.randn(3, 5)).backward()
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        fails()
    assert not later.do_one()
    with collector.step(), later.backward():
        plain(layer, torch.randn(3, 5)).backward()
    collector.stop()  # given up while something waits
    later.do_all()
    collector.close()
    assert torch.equal(place, torch.full((5, 5), 7.0))


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_a_table_with_an_option_of_its_own_is_left_to_torch(option: dict[str, Any]) -> None:
    collected(nn.Embedding(7, 5, **option), plain, [torch.tensor([1, 1, 6])])


def test_what_comes_out_may_be_changed_in_place(counted: list[int]) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        y += 1.0
        return F.relu(y, inplace=True).square().sum()

    collected(nn.Linear(5, 5), loss, [torch.randn(2, 3, 5), torch.randn(3, 5)])
    assert counted


def test_it_is_called_as_torchs(counted: list[int]) -> None:
    layer, wide = nn.Linear(5, 4), nn.Parameter(torch.randn(1, 4))
    layer.register_parameter("wide", wide)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        named = F.linear(input=x, weight=layer.weight, bias=layer.bias)
        return (named + F.linear(x, layer.weight, wide)).square().sum()

    collected(layer, loss, [torch.randn(3, 5)])
    assert counted


def test_a_gradient_that_does_not_exist_is_not_zero() -> None:
    class Ends(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> None:
            return None

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(model, Twice)
        ended: torch.Tensor = Ends.apply(model.second(x))  # type: ignore[no-untyped-call]
        return ended.sum() + model.first(x).square().sum()  # type: ignore[no-any-return]

    collected(Twice(), loss, [torch.randn(3, 5)])


def test_anothers_linear_is_called_and_stays(monkeypatch: pytest.MonkeyPatch, counted: list[int]) -> None:
    calls: list[int] = []
    torchs = F.linear

    def others(*given: Any, **named: Any) -> torch.Tensor:
        calls.append(1)
        return torchs(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(F, "linear", others)
        collected(Twice(), plain, [torch.randn(3, 5)])
        assert len(calls) == 6
        assert counted
        assert F.linear is others  # type: ignore[comparison-overlap]


def test_whoever_changes_operators_gets_gradients_of_the_changed_ones(counted: list[int]) -> None:
    class Doubled(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            return 2 * found if func is torch._C._nn.linear else found

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with Doubled():
            y = model(x)
        return y.square().sum()  # type: ignore[no-any-return]

    collected(Twice(), loss, [torch.randn(3, 5)])
    assert not counted


def test_after_a_step_that_failed_all_is_as_before() -> None:
    layer = nn.Linear(3, 2)
    place = torch.zeros(2, 3)
    collector = GradientCollector(list(layer.parameters()), [IntoBuffer(place), IntoBuffer(torch.zeros(2))])
    found: list[torch.Tensor] = []

    def fail() -> None:
        with collector.step():
            found.append(layer(torch.ones(4, 3)).sum())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    found[0].backward()
    assert layer.weight.grad is not None
    assert not place.any()
    collector.close()


def test_attention_lands_too(counted: list[int]) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    collected(attention, lambda model, x: model(x, x, x)[0].square().sum(), [torch.randn(2, 3, 8)])
    assert len(counted) >= 1


# ── who wants to see it ──────────────────────────────────────────────────────────────────────────────────────


def test_a_hook_of_the_user_still_sees_the_gradient(counted: list[int]) -> None:
    model, seen = Twice(), list[torch.Tensor]()
    model.first.weight.register_hook(seen.append)
    model.second.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))  # type: ignore[arg-type]
    collected(model, plain, [torch.randn(3, 5)])
    assert len(seen) == 4
    assert not counted


def penalized(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The length of a gradient is part of the loss."""
    x = x.clone().requires_grad_()
    found = plain(model, x)
    (slope,) = torch.autograd.grad(found, x, create_graph=True)
    return found + slope.square().sum()


def looked_ahead(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss after a step along a gradient that was taken as a number."""
    weights = [parameter for name, parameter in model.named_parameters() if "unused" not in name]
    slopes = torch.autograd.grad(plain(model, x), weights)
    assert all(slope.abs().sum() for slope in slopes)
    return plain(model, x - 0.01 * sum(slope.sum() for slope in slopes))


class Again(torch.autograd.Function):
    """Computes its gradients by itself, as reversible and implicit layers do."""

    @staticmethod
    def forward(ctx: Any, model: nn.Module, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.model, ctx.x, ctx.weights = model, x, weights
        return plain(model, x).detach()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.enable_grad():
            return None, None, *torch.autograd.grad(plain(ctx.model, ctx.x), ctx.weights, dy)


def nested(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    assert isinstance(model, Twice)
    weights = [*model.first.parameters(), *model.second.parameters()]
    return Again.apply(model, x, *weights)  # type: ignore[no-any-return, no-untyped-call]


def mapped(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.func.vmap(model)(x)
    return found.square().sum()


def half(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).float().square().sum()  # type: ignore[no-any-return]


def recomputed(reentrant: bool) -> Loss:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found = checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)
        return found.square().sum()  # type: ignore[no-any-return, union-attr]

    return loss


@pytest.mark.parametrize(
    ("loss", "lands"),
    [
        (penalized, False),
        (looked_ahead, True),
        (nested, False),
        (mapped, False),
        (half, False),
        (recomputed(reentrant=False), True),
        (recomputed(reentrant=True), True),
    ],
    ids=["penalized", "looked ahead", "nested", "mapped", "half", "recomputed", "recomputed, reentrant"],
)
def test_other_uses_of_a_gradient_are_as_in_plain_torch(loss: Loss, lands: bool, counted: list[int]) -> None:
    collected(Twice(), loss, [torch.randn(3, 5), torch.randn(3, 5)])
    if lands:
        assert counted


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own
def test_forward_derivatives_are_as_in_plain_torch() -> None:
    model = Twice()
    collector = GradientCollector(
        list(model.parameters()), [IntoBuffer(torch.zeros_like(parameter)) for parameter in model.parameters()]
    )
    x, direction = torch.randn(3, 5), torch.randn(3, 5)
    collector.begin()
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(model(forward_ad.make_dual(x, direction))).tangent
    assert found is not None
    collector.finish()
    collector.close()
    expected = torch.func.jvp(model, (x,), (direction,))[1]
    torch.testing.assert_close(found, expected)


def test_outside_of_a_step_the_gradient_is_plain_torchs(counted: list[int]) -> None:
    layer = nn.Linear(3, 2)
    collector = GradientCollector(list(layer.parameters()), [IntoBuffer(torch.zeros(2, 3)), IntoBuffer(torch.zeros(2))])
    x = torch.randn(4, 3)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, torch.ones(4, 2).t() @ x)
    assert not counted
    collector.close()
