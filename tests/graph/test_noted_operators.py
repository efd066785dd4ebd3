"""A graph is proven by its operators, without computing them; what differs in any of them is not taken for the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import ModelError
from paceline.graph import proof
from paceline.graph.capture import capture
from paceline.graph.inputs import take_apart
from paceline.graph.noted_operators import CannotFollow, noted_operators
from paceline.graph.proof import GraphProof, run_whole
from paceline.torch_private import empty_tensor


class Net(nn.Module):
    """Views that are written, statistics, dropout, a weight that is used twice, a value that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)
        self.factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.drop(F.relu(self.norm(self.conv(x)), inplace=True)).mean((2, 3))
        _ = found.view(-1).exp()  # nobody uses it
        found[:, 0] *= self.factor
        first, second = self.fc(self.fc(found)).split(4, 1)
        return first * torch.tensor(0.5) + second


WEIGHTS = torch.rand(4)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=WEIGHTS)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 3, 5, 5, generator=generator), torch.randint(4, (6,), generator=generator)


def same(one: Callable[[nn.Module, Any], Any], other: Callable[[nn.Module, Any], Any], model: nn.Module) -> bool:
    given, known = batch(), {}  # type: ignore[var-annotated]
    inputs = take_apart(given, "batch")[0]
    try:
        first, second = (
            noted_operators(model, inputs, partial(compute, model, given), known, gradients=True)
            for compute in (one, other)
        )
    except CannotFollow:
        return False
    return first.operators == second.operators


def test_a_graph_has_the_operators_of_what_it_was_captured_from() -> None:
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    graph = capture(loss, model, batch())
    assert same(loss, lambda model, given: run_whole(graph, model, given), model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())


class Doubled(torch.autograd.Function):
    """Whose backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


def with_factor(model: nn.Module, given: Any) -> torch.Tensor:
    model.factor = 3.0  # type: ignore[assignment]
    try:
        return loss(model, given)
    finally:
        model.factor = 2.0  # type: ignore[assignment]


OTHERS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "a number in the model": with_factor,
    "a constant": lambda model, given: F.cross_entropy(model(given[0]), given[1], weight=WEIGHTS + 0),
    "a constant's values": lambda model, given: F.cross_entropy(model(given[0]), given[1], weight=torch.ones(4)),
    "a backward": lambda model, given: Doubled.apply(loss(model, given)),
    "another input": lambda model, given: loss(model, (given[0], given[1].flip(0))),
    "one more draw": lambda model, given: (torch.rand(1), loss(model, given))[1],
    "a statistic": lambda model, given: (model.norm.running_mean.add_(1), loss(model, given))[1],  # type: ignore[union-attr, operator]
    "a decision by values": lambda model, given: loss(model, given) if given[0].sum() > -1e9 else None,
    "a weight that is changed at the end": lambda model, given: (loss(model, given), model.fc.weight.detach().mul_(1))[
        0
    ],  # type: ignore[union-attr, operator]
    "a batch that is changed at the end": lambda model, given: (loss(model, given), given[0].mul_(1))[0],
    "a change of a tensor that is nobody's": lambda model, given: (WEIGHTS.mul_(1), loss(model, given))[1],
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_differs_anywhere_is_not_the_same(what: str) -> None:
    model = Net()
    assert same(loss, loss, model)
    assert not same(loss, OTHERS[what], model)


class Nowhere(torch.Tensor):
    """A tensor without memory."""

    @classmethod
    def __torch_dispatch__(cls, *given: Any) -> Any:  # type: ignore[override]
        raise AssertionError("it has nothing to compute with")


def nowhere() -> torch.Tensor:
    return empty_tensor(Nowhere, (200, 200))


def large() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng().random((200, 200)))


def test_constants_go_by_their_values_however_large() -> None:
    model = Net()

    def with_large(model: nn.Module, given: Any) -> torch.Tensor:
        return loss(model, given) + large().mean()

    assert not same(with_large, with_large, model)  # each call has values of its own


def test_tensors_without_values_to_look_at_are_not_the_same() -> None:
    one, other = nowhere(), nowhere()

    def plus(constant: torch.Tensor) -> Callable[[nn.Module, Any], torch.Tensor]:
        return lambda model, given: loss(model, given) + constant.mean()

    assert not same(plus(one), plus(other), Net())


def test_values_are_computed_only_where_operators_do_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given, computed = Net(), batch(), []

    def compare(*arguments: Any, **options: Any) -> None:
        computed.append(arguments)

    monkeypatch.setattr(proof, "compare", compare)
    graph = capture(loss, model, given)
    GraphProof(loss, model, given).prove(graph)
    assert not computed
    GraphProof(with_factor, model, given).prove(graph)
    assert len(computed) == 1


def test_a_number_that_is_returned_beside_the_loss_and_changes_is_refused() -> None:
    model, given, times = Net(), batch(), iter(range(9))

    def counted(model: nn.Module, given: Any) -> Any:
        return {"loss": loss(model, given), "times": next(times)}

    graph = capture(counted, model, given)
    with pytest.raises(ModelError, match=r"gives another number beside the loss \(\d and \d\) when it is called again"):
        GraphProof(counted, model, given).prove(graph)
