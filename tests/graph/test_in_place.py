"""A change in place that nobody sees becomes an operator that gives something new; one that is seen stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.graph.capture import capture
from paceline.graph.in_place import out_of_place
from paceline.graph.operators import changed_by
from paceline.graph.proof import compare


def chained(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = model(x)
    found += x
    return found.mul_(2).relu_().sum()


def seen_through_a_view(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = model(x)
    row = found[0]
    found.relu_()
    return row.sum()


def used_again(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = model(x)
    changed = found.mul_(2)
    return (changed + found).sum()


def of_the_input(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x.clone().add_(1)).sum()


def of_another_kind(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = model(x)
    return found.add_(x.double()).sum()  # stays in float32


@pytest.mark.parametrize(
    ("function", "left"),
    [(chained, 0), (seen_through_a_view, 1), (used_again, 0), (of_the_input, 0), (of_another_kind, 1)],
)
def test_only_changes_that_nobody_sees_are_made_anew(function: Callable[..., torch.Tensor], left: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    graph = capture(function, model, x)
    assert sum(1 for node in graph.nodes for _ in changed_by(node)) > 0
    out_of_place(graph)
    assert sum(1 for node in graph.nodes for _ in changed_by(node)) == left
    compare(function, model, x, graph, gradients=True)
    out_of_place(graph)  # again: it is a fact of a graph
    assert sum(1 for node in graph.nodes for _ in changed_by(node)) == left
