"""Small things to train, each told by what it came to, for `test_trainer.py` to compare one process with two replicas.

`CASES` must not depend on the number of replicas. `REFUSALS` must all end with an error, in every replica alike, so
that one launch can go through all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import paceline as pl

X = torch.randn(26, 4, generator=torch.Generator().manual_seed(1))


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def new_trainer(loss: Callable[[nn.Module, Any], Any] = square, dropout: float = 0.0, **options: Any) -> pl.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 1))
    return pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss, **options)


def losses(trainer: pl.Trainer, dataset: Any = X, batch_size: int = 4, **options: Any) -> list[Any]:
    return [trainer.step(batch) for batch in trainer.batches(dataset, batch_size, **options)]


class Stream:
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(X)


class Rows:
    """A map-style dataset whose samples are dictionaries."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": X[index], "index": index}


def of_rows(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]).squeeze(1) * batch["index"]).square().mean() / 100


def many_metrics(count: int) -> Callable[[nn.Module, Any], dict[str, float]]:
    return lambda model, x: {str(number): 1.0 for number in range(count)}


# ── the same with any number of replicas ─────────────────────────────────────────────────────────────────────


def a_stream() -> Any:
    trainer = new_trainer()
    return [losses(trainer, Stream(), epochs=2), trainer.ledger.check(), trainer.steps]


def a_stream_without_its_last_batch() -> Any:
    trainer = new_trainer()
    return [losses(trainer, Stream(), epochs=2, drop_last=True), trainer.ledger.check()]


def a_dataset_of_dictionaries() -> Any:
    return losses(new_trainer(of_rows), Rows(), epochs=2)


def a_collate_of_the_users_own() -> Any:
    return losses(new_trainer(), Rows(), collate=lambda rows: torch.stack([row["x"] for row in rows]))


def samples_in_order() -> Any:
    return losses(new_trainer(), shuffle=False)


def three_passes_a_batch() -> Any:
    return losses(new_trainer(accumulate=3), batch_size=10)


def a_last_batch_of_one_sample_and_a_loop_that_changes_the_batch() -> Any:
    trainer = new_trainer()
    return [trainer.step(batch * 2) for batch in trainer.batches(X[:9], 4)]


def evaluations() -> Any:
    """Of several metrics, of sizes that do not divide, of fewer samples than replicas."""
    trainer = new_trainer()
    losses(trainer)

    def several(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
        return {"square": square(model, x), "mean": model(x).mean().item(), "one": 1}

    return [
        trainer.evaluate(X[:23], several, batch_size=5),
        trainer.evaluate(X[:1], square),
        trainer.evaluate(Rows(), of_rows, batch_size=3),
        trainer.model.training,
    ]


def as_many_metrics_as_fit() -> Any:
    return len(new_trainer().evaluate(X, many_metrics(1019)))


def batchnorm_and_a_last_batch_of_one_sample() -> Any:
    """Who has no part in a batch must know its statistics all the same: they are used in evaluation."""
    images = torch.randn(9, 4, 3, 3, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(36, 1))
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), square)
    found = losses(trainer, images, epochs=2)
    assert norm.running_mean is not None
    return [found, norm.running_mean.tolist(), trainer.evaluate(images, square)]


def a_batchnorm_that_is_frozen() -> Any:
    """It stays so over steps, evaluations and predictions; the dropout beside it goes on after them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 1)).double()
    model[1].eval()
    before = [module.training for module in model.modules()]
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), square)
    first = losses(trainer, X.double())
    evaluation = trainer.evaluate(X.double(), square)
    prediction = trainer.predictor()(X[:1].double()).item()
    last = losses(trainer, X.double())
    assert [module.training for module in model.modules()] == before, "one process could be as wrong as two"
    assert (int(model[1].num_batches_tracked), model[1].running_mean.any().item()) == (0, False)
    return [first, evaluation, prediction, last]


def random_numbers_of_the_users_own() -> Any:
    """A step draws its own, and leaves the script's alone."""
    trainer = new_trainer(dropout=0.5)
    torch.manual_seed(5)
    losses(trainer)
    return torch.rand(3).tolist()


def a_loop_that_is_left_and_taken_up_again() -> Any:
    trainer, found = new_trainer(), []
    for batch in trainer.batches(X, 4, epochs=2):
        found.append(trainer.step(batch))
        if len(found) == 3:
            break
    for _ in trainer.batches(X, 4, epochs=0):
        break
    found += losses(trainer, epochs=0)
    return [found, trainer.steps, trainer.ledger.check()]


def dropout_draws_the_same_for_the_same_seed() -> Any:
    one, again = (losses(new_trainer(dropout=0.5), shuffle=False, seed=3) for _ in range(2))
    other = losses(new_trainer(dropout=0.5), shuffle=False, seed=4)
    undropped = losses(new_trainer(), shuffle=False, seed=3)
    return {"same seed": one == again, "other seed": one == other, "none": one == undropped}


CASES: dict[str, Callable[[], Any]] = {
    act.__name__: act
    for act in (
        a_stream,
        a_stream_without_its_last_batch,
        a_dataset_of_dictionaries,
        a_collate_of_the_users_own,
        samples_in_order,
        three_passes_a_batch,
        a_last_batch_of_one_sample_and_a_loop_that_changes_the_batch,
        evaluations,
        as_many_metrics_as_fit,
        batchnorm_and_a_last_batch_of_one_sample,
        a_batchnorm_that_is_frozen,
        random_numbers_of_the_users_own,
        a_loop_that_is_left_and_taken_up_again,
        dropout_draws_the_same_for_the_same_seed,
    )
}


# ── refused by two replicas ──────────────────────────────────────────────────────────────────────────────────


def fewer_samples_a_batch_than_replicas() -> None:
    losses(new_trainer(), batch_size=1)


def too_many_metrics() -> None:
    new_trainer().evaluate(X, many_metrics(1020))


def another_learning_rate_in_one_replica() -> None:
    trainer = new_trainer()
    for batch in trainer.batches(X, 4):
        if trainer.steps == 2 and trainer.replica == 1:
            trainer.optimizer.param_groups[0]["lr"] = 0.2
        trainer.step(batch)


def a_loss_that_is_not_a_number_any_more() -> None:
    trainer: pl.Trainer = new_trainer(lambda model, x: square(model, x) * (float("nan") if trainer.steps == 3 else 1))
    losses(trainer)


def a_loss_a_sample() -> None:
    losses(new_trainer(lambda model, x: model(x).square()))


def a_batch_that_is_never_trained_on() -> None:
    for _ in new_trainer().batches(X, 4):
        pass


def a_strategy_of_other_size() -> None:
    new_trainer(strategy=pl.Mirrored(replicas=3))


REFUSALS: dict[str, Callable[[], None]] = {
    act.__name__: act
    for act in (
        fewer_samples_a_batch_than_replicas,
        too_many_metrics,
        another_learning_rate_in_one_replica,
        a_loss_that_is_not_a_number_any_more,
        a_loss_a_sample,
        a_batch_that_is_never_trained_on,
        a_strategy_of_other_size,
    )
}


def sentence_of(act: Callable[[], None]) -> str:
    try:
        act()
    except pl.PacelineError as error:
        return str(error)
    return "was not refused"


if __name__ == "__main__":
    for name, act in CASES.items():
        print(json.dumps({name: act()}))
    for name, refused in REFUSALS.items():
        print(json.dumps({name: sentence_of(refused)}))
