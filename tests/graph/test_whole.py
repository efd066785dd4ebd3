"""A module that is kept whole is one operator: it may decide by values, and has the gradients that autograd finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.errors import ModelError
from paceline.graph.capture import capture
from paceline.graph.operators import changed_by
from paceline.graph.proof import compare
from paceline.graph.whole import WholeCall

WIDTH = 6


class Experts(nn.Module):
    """Each row goes to the expert of its largest element: which of them are run follows from values."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        which = x.argmax(-1) % 3
        out = torch.zeros_like(x)
        for expert in which.unique().tolist():
            rows = (which == expert).nonzero()[:, 0]
            out = out.index_add(0, rows, self.parts[expert](x[rows]))
        return {"out": self.norm(out) * scale, "cache": {1, 2}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.experts, self.last = nn.Linear(4, WIDTH), Experts(), nn.Linear(WIDTH, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.experts(self.first(x), scale=0.5)["out"])  # type: ignore[no-any-return]


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def rows(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


def test_a_marked_module_is_one_operator_with_all_gradients_and_buffers() -> None:
    model = Net()
    pl.whole(model.experts)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    graph = capture(loss, model, rows())
    (node,) = (node for node in graph.nodes if isinstance(node.target, WholeCall))
    assert node.meta["modules"] == ["", "experts"]
    names = [graph.names[operand] for operand in changed_by(node)]
    assert names == ["experts.norm.running_mean", "experts.norm.running_var", "experts.norm.num_batches_tracked"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    compare(loss, model, rows(), graph, gradients=True)
    # Other rows go to other experts, by the same graph.
    compare(loss, model, -rows(), graph, gradients=True)


def test_a_class_can_be_marked_too() -> None:
    @pl.whole
    class Kept(Experts):
        pass

    model = Net()
    model.experts = Kept().double()
    compare(loss, model, rows(), capture(loss, model, rows()), gradients=True)


def test_what_decides_by_values_is_refused_with_its_line_and_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"at test_whole.py:\d+ \(for expert in .*pl.whole\(model.experts\), or use"):
        capture(loss, Net(), rows())
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([Net()])[0]).double()
    with pytest.raises(ModelError, match=r"pl.whole\(model\[1\].experts\)"):
        capture(loss, model, rows())


def test_a_batchnorm_that_counts_its_batches_is_kept_whole_by_itself() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None), nn.Linear(WIDTH, 2)).double()
    compare(loss, model, rows(), capture(loss, model, rows()), gradients=True)


@pl.whole
def of_letters(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Its shapes inside follow from the longest of the labels, and torch.export cannot follow it."""
    lengths = (torch.full((scores.size(1),), count) for count in (scores.size(0), labels.size(1)))
    return F.ctc_loss(scores, labels, *lengths)


def test_a_function_can_be_one_operator() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, WIDTH), nn.LogSoftmax(-1)).double()
    batch = torch.randn(9, 3, 4, dtype=torch.float64), torch.tensor([[1, 2], [3, 4], [2, 5]])

    def letters(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return of_letters(model(batch[0]), batch[1])

    compare(letters, model, batch, capture(letters, model, batch), gradients=True)


def test_hooks_of_a_marked_module_run_once() -> None:
    torch.manual_seed(0)
    model = Net()
    model.first = pl.whole(nn.utils.spectral_norm(model.first))  # by a hook, which changes buffers
    model.experts = nn.Identity()  # type: ignore[assignment]
    model.forward = lambda x: model.last(model.first(x))  # type: ignore[method-assign]
    compare(loss, model, rows(), capture(loss, model, rows()), gradients=True)


class Uses(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.experts(self.first(x))
        return self.last(found["out"]) * found["cache"].pop()  # type: ignore[no-any-return]


class Changes(Experts):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        return super().forward(x.clamp_(-1, 1), scale=scale)


class Grows(nn.Module):
    """What it returns has as many rows as there are positive ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = pl.whole(Picks())
        self.last = nn.Linear(4, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x))  # type: ignore[no-any-return]


class Picks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x[:, 0] > 0]


def test_what_a_graph_cannot_have_of_it_is_refused() -> None:
    uses, changes = Uses(), Net()
    pl.whole(uses.experts)
    changes.experts = pl.whole(Changes()).double()
    with pytest.raises(ModelError, match=r"experts, which is kept whole.*the set that it returns cannot be used"):
        capture(loss, uses, rows())
    with pytest.raises(ModelError, match="it changes a tensor that it is given; have it change a copy"):
        capture(loss, changes, rows())
    with pytest.raises(ModelError, match="give a module, a class of modules or a function"):
        pl.whole(torch.ones(2))  # type: ignore[type-var]
    grows = Grows()
    graph = capture(loss, grows, rows())
    with pytest.raises(ModelError, match=r"inner, which is kept whole.*shapes \[\(8, 4\)\] where it gave"):
        compare(loss, grows, rows().abs(), graph, gradients=True)
