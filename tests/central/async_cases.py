"""Asynchronous trainings, one after another, each told by what every replica saw of it, for `test_async.py`.

All of them are done in one launch, each with a trainer of its own: starting torch takes longer than any of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.central.chief.books import Books
from paceline.rules import Async, Rule, Sync
from paceline.run_place import PLACE_VARIABLE, find_place

WORK_S = 0.08  # of one of several equal replicas
DRAW = torch.Generator().manual_seed(5)
X = torch.randn(240, 6, generator=DRAW)
Y = X @ torch.randn(6, 1, generator=DRAW) + 0.5


def regression(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


class Sum(nn.Module):
    """Its gradient is 1 wherever it stands: where it gets to, says what every gradient counted."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.at.sum() + 0.0 * x.mean()


def together(trainer: pl.Trainer) -> None:
    """Go on when all replicas have come to this trainer."""
    number = sum(path.name.endswith(f"-{trainer.replica}") for path in Path().glob("trainer-*"))
    Path(f"trainer-{number}-{trainer.replica}").touch()
    while len(list(Path().glob(f"trainer-{number}-*"))) < trainer.replicas:
        time.sleep(0.002)


def books(trainer: pl.Trainer) -> Books:
    return trainer._loop.engine.books()  # type: ignore[attr-defined]


def told(trainer: pl.Trainer, **more: Any) -> dict[str, Any]:
    notes = books(trainer)
    return {
        "steps": notes.step,
        "staleness": trainer.staleness,
        "dropped": notes.dropped,
        "late": notes.late,
        "ledger": trainer.ledger.check(),
        **more,
    }


def new_regression(rule: Rule, loss: Any = regression) -> pl.Trainer:
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), loss)
    trainer.rule = rule
    together(trainer)
    return trainer


def converges() -> dict[str, Any]:
    trainer = new_regression(Async())
    for batch in trainer.batches((X, Y), 8, epochs=8):
        trainer.step(batch)
    mean = trainer.evaluate((X, Y), lambda model, batch: regression(model, batch).item())
    return told(trainer, loss=mean)


def equal_replicas(count: int) -> Callable[[], dict[str, Any]]:
    """Of the replicas only so many train, and take equally long. They report at different times: of two that do at the
    same moment, one may see the update of the other before it begins anew."""

    def slow(model: nn.Module, batch: Any) -> torch.Tensor:
        left_s = (trainer.replica * WORK_S / count - time.monotonic()) % WORK_S
        time.sleep(left_s if left_s > WORK_S / 2 else left_s + WORK_S)
        return regression(model, batch)

    def case() -> dict[str, Any]:
        nonlocal trainer
        trainer = new_regression(Async(), slow)
        batches = trainer.batches((X, Y), 4)
        for batch in batches if trainer.replica < count else ():
            trainer.step(batch)
        return told(trainer) if trainer.replica == 0 else {}

    trainer: pl.Trainer
    return case


def summed(rule: Rule) -> Callable[[], dict[str, Any]]:
    """Where `Sum` gets to under a rule."""

    def slow(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.005)
        return model(x)  # type: ignore[no-any-return]

    def case() -> dict[str, Any]:
        model = Sum()
        trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), slow)
        trainer.rule = rule
        together(trainer)
        for batch in trainer.batches(X, 4):
            trainer.step(batch)
        return told(trainer, at=model.at.item())

    return case


def as_typed() -> dict[str, Any]:
    """Under the flags of the run; the epoch of each piece of work."""
    model = Sum()
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), lambda model, x: model(x))
    together(trainer)
    epochs = []
    for batch in trainer.batches(X, 4, epochs=3):
        epochs.append(trainer._loop._drawn.batches[0].work.assignment.epoch)  # type: ignore[attr-defined]
        trainer.step(batch)
    return told(trainer, at=model.at.item(), epochs=epochs)


def without_warm_up() -> None:
    """For all trainers from now on."""
    place = find_place()
    strategy = msgspec.structs.replace(place.strategy, warmup_epochs=0)
    os.environ[PLACE_VARIABLE] = msgspec.json.encode(msgspec.structs.replace(place, strategy=strategy)).decode()


def bounded() -> dict[str, Any]:
    """Three replicas are quick and one is not: when each began and ended its work."""
    began: list[float] = []
    ended: list[float] = []

    def timed(model: nn.Module, batch: Any) -> torch.Tensor:
        began.append(time.monotonic())
        time.sleep(0.06 if trainer.replica == 0 else 0.001)
        ended.append(time.monotonic())
        return regression(model, batch)

    trainer = new_regression(Async(bound=2), timed)
    for batch in trainer.batches((X, Y), 6):
        trainer.step(batch)
    return told(trainer, began=began, ended=ended)


def changing_rules() -> dict[str, Any]:
    """Sync, then async, then sync again, as the first replica says."""
    trainer = new_regression(Sync())
    losses = []
    for batch in trainer.batches((X, Y), 8, epochs=3):
        losses.append(trainer.step(batch))
        if trainer.replica == 0:
            trainer.rule = Async(stale="compensate") if 10 <= trainer.steps < 60 else Sync()
    mean = trainer.evaluate((X, Y), lambda model, batch: regression(model, batch).item())
    return told(trainer, losses=losses, loss=mean)


class Slow(torch.utils.data.Dataset[Any]):
    """Takes its time, and knows when it gave which sample."""

    def __init__(self) -> None:
        self.given: dict[int, float] = {}

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.0005)
        self.given[index] = time.monotonic()
        return X[index], Y[index], index


def ahead() -> dict[str, Any]:
    """How many batches of a slow dataset were there when the one before had been computed."""
    data = Slow()

    def slow(model: nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(0.02)
        return regression(model, batch[:2])

    trainer = new_regression(Async(), slow)
    ahead, steps, ended = 0, 0, 0.0
    for batch in trainer.batches(data, 6):
        ahead += all(data.given[index] < ended for index in batch[2].tolist())
        trainer.step(batch)
        steps, ended = steps + 1, time.monotonic()
    return told(trainer, ahead=ahead, own_steps=steps)


def elsewhere(how: str) -> Callable[[], dict[str, Any]]:
    """After a few steps one replica does something else, and the others need what it would have computed next."""

    def case() -> dict[str, Any]:
        trainer = new_regression(Async())
        for number, batch in enumerate(trainer.batches((X, Y), 8)):
            trainer.step(batch)
            if trainer.replica == 0 and number == 2 and how == "breaks":
                break
            if trainer.replica == 0 and number == 2 and how == "evaluates":
                trainer.evaluate((X, Y), lambda model, batch: regression(model, batch).item())
        return told(trainer)

    return case


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "converges": converges,
    "2 equal replicas": equal_replicas(2),
    "3 equal replicas": equal_replicas(3),
    "4 equal replicas": equal_replicas(4),
    "keep": summed(Async()),
    "drop": summed(Async(stale="drop:1")),
    "scale": summed(Async(stale="scale")),
    "compensate": summed(Async(stale=f"compensate:{0.01 / 4}")),
    "compensate strongly": summed(Async(stale="compensate:1000")),
    "stale-lr": summed(Async(lr=0.25)),
    "ahead": ahead,
    "one breaks": elsewhere("breaks"),
    "one evaluates": elsewhere("evaluates"),
    "bounded": bounded,
    "changing rules": changing_rules,
}


def main() -> None:
    print(json.dumps({"as typed": as_typed()}))
    without_warm_up()
    for name, case in CASES.items():
        print(json.dumps({name: case()}))


if __name__ == "__main__":
    main()
