"""Losses that are a sum and a count, and losses with numbers to log: in one process, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.errors import LossError
from paceline.loop.returned_loss import read_loss
from paceline.loss_value import NOTHING, LossPart, MeanPart, SumUnit, Weight, over_samples

CLIP = 0.1
X = torch.randn(24, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
COUNTS = torch.tensor([0, 0, 0, 1, 30, 0, 2, 5] * 3).double()

Returned = Callable[[torch.Tensor, torch.Tensor], Any]


def new_training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def counted(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x, counts = batch
    return (model(x).squeeze(1).square() * counts).sum(), counts.sum()


def trained(
    loss: Any, accumulate: int = 1, batch_size: int = 8
) -> tuple[nn.Module, list[float], list[dict[str, float]]]:
    model, optimizer = new_training()
    trainer = pl.Trainer(model, optimizer, loss, clip_norm=CLIP, accumulate=accumulate)
    losses, logged = [], []
    for batch in trainer.batches((X, COUNTS), batch_size, shuffle=False):
        losses.append(trainer.step(batch))
        logged.append(trainer.logged)
    trainer.close()
    return model, losses, logged


@pytest.mark.parametrize("accumulate", [1, 3, 8])
def test_an_update_is_that_of_the_mean_over_all_that_was_counted(accumulate: int) -> None:
    model, losses, _ = trained(counted, accumulate)
    alone, optimizer = new_training()
    expected = []
    for start in range(0, len(X), 8):
        optimizer.zero_grad()
        total, count = counted(alone, (X[start : start + 8], COUNTS[start : start + 8]))
        mean = total / count
        mean.backward()  # type: ignore[no-untyped-call]
        length = nn.utils.clip_grad_norm_(alone.parameters(), CLIP)
        assert length > CLIP  # which bites, so it has to see the gradient of the mean
        optimizer.step()
        expected.append(float(mean.detach()))
    assert losses == pytest.approx(expected, rel=1e-12)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_numbers_beside_the_loss_are_logged_as_means_over_the_batch(accumulate: int) -> None:
    def loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        x, counts = batch
        squares = model(x).squeeze(1).square()
        return {
            "loss": squares.mean(),
            "first": x[:, 0].mean(),
            "counted": (float((x[:, 1] * counts).sum()), counts.sum()),
        }

    _, losses, logged = trained(loss, accumulate)
    assert len(losses) == len(logged) == 3
    for number, means in enumerate(logged):
        x, counts = X[8 * number : 8 * number + 8], COUNTS[8 * number : 8 * number + 8]
        expected = {"first": float(x[:, 0].mean()), "counted": float((x[:, 1] * counts).sum() / counts.sum())}
        assert means == pytest.approx(expected, rel=1e-12)


def test_a_number_beside_a_sum_is_weighted_as_the_loss_is_and_left_out_where_nothing_counts() -> None:
    def loss(model: nn.Module, batch: Any) -> dict[str, Any]:
        total, count = counted(model, batch)
        return {"loss": (total, count), "again": total.detach() / count}  # not a number where the count is 0

    _, losses, logged = trained(loss, accumulate=8)
    assert [means["again"] for means in logged] == pytest.approx(losses, rel=1e-12)


def test_a_part_that_counts_nothing_need_not_have_a_gradient() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        total, count = counted(model, batch)
        return (total, count) if count else (torch.zeros(()), 0)

    assert trained(loss, accumulate=8)[1] == pytest.approx(trained(counted)[1], rel=1e-12)


WRONG: dict[str, tuple[Returned, str]] = {
    "nothing counted": (
        lambda total, count: (total, 0),
        "loss is 'a sum over 0': the counts of the whole batch add up to",
    ),
    "below 0": (lambda total, count: (total, -1), "count of loss is -1.0: it must be finite, and 0 or more (at step 0"),
    "not finite": (
        lambda total, count: (total, float("inf")),
        "count of loss is inf: it must be finite, and 0 or more",
    ),
    "no number": (
        lambda total, count: (total, "12"),
        "count of loss is 'str': give a number or a scalar tensor (at step",
    ),
    "a count a sample": (
        lambda total, count: (total, torch.ones(3)),
        "count of loss is 'a tensor of shape (3,)': give a",
    ),
    "three": (
        lambda total, count: (total, count, 1),
        "loss is 'a tuple of 3': return (sum, count) (at step 0 on replica 0)",
    ),
    "no sum": (
        lambda total, count: (total.expand(4), count),
        "loss is 'a tensor of shape (4,)': return its sum, a scalar",
    ),
    "a number": (lambda total, count: (1.0, count), "loss is 'float': return a scalar tensor (at step 0 on replica 0)"),
    "not finite sum": (
        lambda total, count: (total / 0, count),
        "loss is inf: it must be finite (at step 0 on replica 0)",
    ),
    "no loss": (
        lambda total, count: {"losses": total},
        "loss is \"a dict with 'losses'\": give it the key 'loss' (at step",
    ),
    "no scalar": (
        lambda total, count: {"loss": total, "all": torch.ones(2)},
        "logged all is 'a tensor of shape (2,)': give a number or a scalar tensor (at step 0 on replica 0)",
    ),
    "no number to log": (lambda total, count: {"loss": total, "name": "x"}, "logged name is 'str': give a number or a"),
}


@pytest.mark.parametrize(("returned", "sentence"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_trained_on_is_one_sentence(returned: Returned, sentence: str) -> None:
    with pytest.raises(LossError) as raised:
        trained(lambda model, batch: returned(*counted(model, batch)))
    assert str(raised.value).startswith(sentence), str(raised.value)


@pytest.mark.parametrize("counts_first", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_of_another_kind_than_before_is_refused(counts_first: bool, accumulate: int) -> None:
    calls: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Any:
        calls.append(1)
        total, count = counted(model, batch)
        return (total, count + 1) if (len(calls) == 1) == counts_first else total

    now, before = ("a scalar", "(sum, count)") if counts_first else ("(sum, count)", "a scalar")
    with pytest.raises(LossError) as raised:
        trained(loss, accumulate)
    step = 1 if accumulate == 1 else 0
    expected = f"loss is {now!r}: it was {before} before, return the same kind each time (at step {step} on replica 0)"
    assert str(raised.value) == expected


def test_a_metric_may_be_a_sum_and_a_count() -> None:
    model, optimizer = new_training()
    trainer = pl.Trainer(model, optimizer, counted)
    total, count = counted(model, (X, COUNTS))
    mean = float((total / count).detach())
    assert trainer.evaluate((X, COUNTS), counted, batch_size=5) == pytest.approx(mean, rel=1e-12)
    found = trainer.evaluate(
        (X, COUNTS), lambda model, batch: {"first": batch[0][:, 0].mean(), "loss": counted(model, batch)}, batch_size=5
    )
    assert found == pytest.approx({"first": float(X[:, 0].mean()), "loss": mean}, rel=1e-12)
    calls: list[int] = []

    def changing(model: nn.Module, batch: Any) -> Any:
        calls.append(1)
        return counted(model, batch) if len(calls) < 3 else 1.0

    with pytest.raises(LossError, match=r"^metric is 'a scalar': it was \(sum, count\) before, return the same kind$"):
        trainer.evaluate((X, COUNTS), changing, batch_size=5)
    with pytest.raises(LossError, match=r"^count of metric b is -1.0: it must be finite, and 0 or more$"):
        trainer.evaluate((X, COUNTS), lambda *_: {"b": (1.0, -1)}, batch_size=5)


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_gradients_are_as_large_as_those_of_a_mean_whatever_is_counted() -> None:
    """A wire of 16 bits ends at 65504."""
    parameter = torch.ones((), requires_grad=True)
    unit = SumUnit(4, 8)
    for count in (2.0**20, 2.0**21):
        found = read_loss((parameter * count, count), "")
        found.backward(Weight(0.25, unit))
    assert parameter.grad is not None
    assert float(parameter.grad) == 1.5  # (1 + 2) · 2²⁰, over twice the first count


def test_parts_are_added_up_in_any_groups() -> None:
    parts = [
        LossPart(MeanPart(1.0, 2.0), 2.0, {"a": MeanPart(1.0, 1.0)}),
        NOTHING,
        LossPart(MeanPart(5.0, 1.0), 2.0, {"a": MeanPart(3.0, 1.0)}),
    ]
    total = parts[0] + parts[1] + parts[2]
    assert total == parts[0] + (parts[1] + parts[2]) == LossPart(MeanPart(6.0, 3.0), 2.0, {"a": MeanPart(4.0, 2.0)})
    assert (total.counted, total.means, total.weight(total.loss.count if total.loss else None)) == (
        True,
        {"a": 2.0},
        2 / 3,
    )
    assert over_samples([MeanPart(1.0), MeanPart(4.0)], [2, 1]).mean == 2.0
    assert over_samples([MeanPart(1.0, 1.0), MeanPart(4.0, 0.0)], [2, 1]) == MeanPart(5.0, 1.0)
    with pytest.raises(LossError, match=r"^loss is 'a scalar': another part of the batch has \(sum, count\)"):
        _ = total + LossPart(MeanPart(1.0))
    with pytest.raises(LossError, match=r"^logged a is 'a scalar': it is another kind in another part of the batch"):
        _ = total + LossPart(MeanPart(1.0, 1.0), 1.0, {"a": MeanPart(1.0)})
