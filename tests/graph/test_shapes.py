"""Graphs of other shapes are what would be captured, and mostly need no capturing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.graph import shapes as room
from paceline.graph.proof import compare
from paceline.graph.shapes import AllShapes

WORDS = 20


class Language(nn.Module):
    """Sizes in all that can be asked of them: views, arange, a mask, dropout, a mean by length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(16, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.out = nn.Linear(8, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length = x.shape
        mask = torch.full((length, length), float("-inf")).triu(1)
        found = self.layer(self.words(x) + self.places(torch.arange(length)), src_mask=mask)
        return self.out(found.reshape(count * length, -1)) / length


class Odd(Language):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return found * 2 if x.size(1) % 2 else found


class Loop(Language):
    """A loop over time: every length is a graph of its own, whatever the number of samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.words(x[:, 0])
        for step in range(1, x.size(1)):
            state = torch.tanh(self.words(x[:, step]) + state)
        return self.out(state).repeat(x.size(1), 1)


class Chosen(Language):
    """How many words there are follows from which they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return found + found[x.reshape(-1) > 3].mean()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["x"].reshape(-1))


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module, Sequence[tuple[int, int]]], int]:
    def count(model: nn.Module, shapes: Sequence[tuple[int, int]]) -> int:
        made = []

        def counted(*given: Any) -> Any:
            made.append(given)
            return capture(*given)

        capture = room.capture
        monkeypatch.setattr(room, "capture", counted)
        every = AllShapes()
        for shape in shapes:
            batch = {"x": torch.randint(WORDS, shape)}
            every.see(batch)
            compare(loss, model, batch, every.graph(loss, model, batch), gradients=True)
        return len(made)

    return count


def test_the_second_shape_is_the_last_that_is_captured(captures: Callable[..., int]) -> None:
    assert captures(Language(), [(4, 5), (4, 6), (4, 9), (4, 3)]) == 2
    assert captures(Language(), [(4, 5), (3, 6), (2, 9), (7, 3)]) == 2  # both


def test_a_dim_that_differs_later_is_opened_then_and_one_is_a_size_of_its_own(captures: Callable[..., int]) -> None:
    assert captures(Language(), [(4, 5), (4, 6), (3, 7), (2, 8), (1, 7), (1, 9), (5, 4)]) == 4


def test_code_that_decides_by_sizes_is_captured_for_each_decision(captures: Callable[..., int]) -> None:
    assert captures(Odd(), [(4, 5), (4, 6), (4, 8), (4, 7), (4, 10), (4, 9), (4, 3)]) == 3


def test_a_loop_over_time_is_captured_once_a_length(captures: Callable[..., int]) -> None:
    assert captures(Loop(), [(4, 3), (4, 4), (3, 4), (2, 4), (5, 3), (4, 3), (6, 4)]) <= 4


def test_sizes_that_follow_from_values_are_captured_shape_by_shape(captures: Callable[..., int]) -> None:
    assert captures(Chosen(), [(4, 5), (4, 6), (4, 9)]) <= 4  # one that could not be filled
