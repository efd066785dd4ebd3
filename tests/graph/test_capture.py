"""A computation's graph gives what the computation gives, and what cannot be captured is refused with its line."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import ModelError
from paceline.graph.capture import capture
from paceline.graph.inputs import take_apart
from paceline.graph.proof import GraphProof, compare, run_whole

WIDTH = 6


class Answer:
    """A class that nobody knows, as published models return them."""

    def __init__(self, loss: torch.Tensor, cache: list[Any]) -> None:
        self.loss, self.cache = loss, cache


class Published(nn.Module):
    """What published models do in a forward: classes of their own, item assignment, no_grad, buffers, loops."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(11, WIDTH), nn.Embedding(9, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.double()

    def forward(self, words: torch.Tensor, labels: torch.Tensor | None = None) -> Answer:
        x = self.tokens(words) + self.places(torch.arange(words.size(1)))
        cache = []
        for layer in self.layers:
            with torch.no_grad():
                gate = torch.sigmoid(x.mean(-1, keepdim=True))
            x = x + F.gelu(layer(x)) * gate * self.scale
            cache.append(x)
        x = self.drop(self.norm(x.transpose(1, 2)).transpose(1, 2))
        scores = self.head(x)
        shifted = torch.zeros_like(words if labels is None else labels)
        shifted[:, :-1] = (words if labels is None else labels)[:, 1:]
        return Answer(F.cross_entropy(scores.flatten(0, 1), shifted.flatten()), cache)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def words(samples: int = 4) -> dict[str, torch.Tensor]:
    drawn = torch.randint(11, (samples, 7), generator=torch.Generator().manual_seed(samples))
    return {"words": drawn, "labels": drawn.flip(0)}


@pytest.mark.parametrize("training", [True, False])
def test_a_published_model_is_captured_with_all_its_gradients(training: bool) -> None:
    model = Published().train(training)
    graph = capture(loss, model, words())
    compare(loss, model, words(), graph, gradients=True)
    assert "unused" not in graph.tensors
    assert "head.weight" not in graph.tensors  # is the table
    modules = {path for node in graph.nodes for path in node.meta["modules"]}
    assert {"layers.0", "layers.1", "head"} <= modules


def test_capturing_changes_neither_buffers_nor_random_numbers() -> None:
    model = Published()
    before, random = {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.get_rng_state()
    compare(loss, model, words(), capture(loss, model, words()), gradients=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())


def test_autocast_inside_a_loss_is_a_mode_of_its_operators() -> None:
    def under_autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found = model(x)
        return found.float().square().mean()

    torch.manual_seed(0)
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(3, WIDTH)
    graph = capture(under_autocast, model, x)
    compare(under_autocast, model, x, graph, gradients=True)
    assert not torch.is_autocast_enabled("cpu")


class LeavesOut(nn.Module):
    """Layers that are left out at random, as models of `transformers` do it."""

    def __init__(self, layerdrop: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.layerdrop = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), layerdrop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            dropout_probability = torch.rand([])
            if dropout_probability < self.layerdrop:
                continue
            x = F.dropout(layer(x), 0.5)
        return x


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def test_layers_that_are_never_left_out_are_followed_and_what_is_drawn_for_them_still_is() -> None:
    model, x = LeavesOut(0.0), torch.randn(3, WIDTH)
    graph = capture(squared, model, x)
    assert [str(node.target) for node in graph.nodes].count("aten.rand.default") == 2
    assert GraphProof(squared, model, x).holds(graph)
    compare(squared, model, x, graph, gradients=True)  # with the same masks
    with pytest.raises(ModelError, match=r"if dropout_probability < self.layerdrop:\), so it cannot be cut"):
        capture(squared, LeavesOut(0.1), x)


def test_a_number_that_was_drawn_and_changed_is_not_taken_for_one_that_was_drawn() -> None:
    def changed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand([])
        drawn -= 1
        return squared(model, x) * (2 if drawn < 0 else 1)

    with pytest.raises(ModelError, match="it decides by the values of a tensor"):
        capture(changed, LeavesOut(0.0), torch.randn(3, WIDTH))


@dataclasses.dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    name: str


def test_batches_of_any_class_are_taken_apart_and_filled_anew() -> None:
    one = {"pair": Pair(torch.ones(2), "a"), "more": UserDict(y=torch.zeros(3)), "count": 4}
    tensors, structure = take_apart(one, "batch")
    assert [tensor.tolist() for tensor in tensors] == [[1, 1], [0, 0, 0]]
    filled = structure.fill([torch.full((2,), 5.0), torch.ones(3)])
    assert filled["pair"] == Pair(filled["pair"].x, "a")
    assert filled["pair"].x.tolist() == [5, 5]
    assert filled["more"]["y"].tolist() == [1, 1, 1]
    assert one["pair"].x.tolist() == [1, 1]  # type: ignore[attr-defined]
    assert structure.same_as(take_apart(one, "batch")[1])
    assert not structure.same_as(take_apart({**one, "count": 5}, "batch")[1])
    with pytest.raises(ModelError, match="it has a object"):
        take_apart([object()], "batch")


def test_another_batch_of_the_same_shape_has_the_same_graph() -> None:
    model = Published().eval()
    graph = capture(loss, model, words())
    other = {name: tensor.roll(1, 0) for name, tensor in words().items()}
    (found,) = run_whole(graph, model, other)
    torch.testing.assert_close(found, loss(model, other), rtol=1e-12, atol=0)


class Estimator(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy


def deciding(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean() if x.sum() > 0 else model(x).sum()


def estimated(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return Estimator.apply(model(x) * 9).square().mean()  # type: ignore[no-any-return]


class Counting:
    calls = 0

    def __call__(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return model(x).square().mean() * self.calls


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (deciding, r"at test_capture.py:\d+ \(return model\(x\).mean\(\) if x.sum\(\) > 0 .* decides by the values"),
        (estimated, "gives another gradient of weight than when it is called"),
        (Counting(), "it gives another loss when it is called again with the same batch"),
    ],
)
def test_what_a_graph_cannot_have_is_refused_with_a_sentence(function: Callable[..., Any], sentence: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(3, WIDTH)
    with pytest.raises(ModelError, match=sentence) as refused:
        compare(function, model, x, capture(function, model, x), gradients=True)
    assert "\n" not in str(refused.value)
