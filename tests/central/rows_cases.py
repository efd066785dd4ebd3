"""Trainings with tables, one after another, for `test_rows_ahead.py`: what was looked up ahead, and what came of it.

Tables are small and the learning rate is large: neighbouring batches of all replicas share most of their rows, so a row
that misses the last step's change shows in the next loss.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from durable_training import pid_of
from torch import nn

import paceline as pl
from paceline.rules import Async, Rule

ROWS, WIDTH, SAMPLES, BATCH, EPOCHS = 23, 4, 66, 12, 2
KILLED = {3: "server 1", 6: "server 0"}  # after how many steps
DRAW = torch.Generator().manual_seed(3)
IDS = torch.randint(ROWS - 1, (SAMPLES, 3), generator=DRAW)
Y = torch.randn(SAMPLES, generator=DRAW)


class Two(nn.Module):
    """Two tables, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.other = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        first = self.one(ids[:, 0]) + self.one(ids[:, 2])
        out: torch.Tensor = self.head(torch.cat([first, self.other(ids[:, 1:]).sum(1)], 1))
        return out[:, 0]


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.table(ids).sum(1))
        return out[:, 0]


def columns(model: nn.Module, batch: Any) -> torch.Tensor:
    ids, y = batch
    return (model(ids) - y).square().mean()


def casts(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch["of"][1].long()) - batch["y"]).square().mean()


def changes(model: nn.Module, batch: Any) -> torch.Tensor:
    """Looks up other rows than there are in the batch that the feed has made, in the same memory."""
    ids, y = batch
    return (model(ids.add_(1)) - y).square().mean()


def linear(model: nn.Module, batch: Any) -> torch.Tensor:
    """Its gradient is the same wherever the rows stand: in whatever order updates come, they end at the same place."""
    ids, _ = batch
    rows: torch.Tensor = model.table(ids)  # type: ignore[operator]
    return rows.sum(1).mean()


class Nested(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return {"y": Y[index], "of": (torch.zeros(2), IDS[index].int())}


def train(
    model: nn.Module, loss: Any, data: Any, accumulate: int = 1, size: int = BATCH, rule: Rule | None = None
) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    trainer = pl.Trainer(model, optimizer, loss, accumulate=accumulate)
    engine: Any = trainer._loop.engine  # type: ignore[attr-defined]
    client = getattr(engine, "client", None)
    ahead = client.rows.ahead if client is not None else None
    losses, guessed, steps = [], 0, 0
    if rule is not None and client is not None:
        trainer.rule = rule
    for batch in trainer.batches(data, size, epochs=EPOCHS, seed=1):
        losses.append(trainer.step(batch))
        steps += 1
        if "--kill" in sys.argv and trainer.replica == 0 and steps in KILLED:
            os.kill(pid_of(KILLED[steps]), signal.SIGKILL)  # rows of the next batch are under way
        guessed += bool(ahead is not None and ahead._expected)
    measured = trainer.evaluate(data, lambda model, batch: loss(model, batch))
    used = ahead.used if ahead is not None else None
    return {"losses": losses, "measured": measured, "used": used, "guessed": guessed, "steps": steps}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "columns": lambda: train(Two(), columns, (IDS, Y)),
    "passes": lambda: train(Two(), columns, (IDS, Y), accumulate=2),
    "casts": lambda: train(One(), casts, Nested()),
    "changes": lambda: train(One(), changes, (IDS, Y)),
    "async": lambda: train(One(), linear, (IDS, Y), size=6, rule=Async()),
}


def main() -> None:
    for name in ["columns"] if "--kill" in sys.argv else CASES:
        case = CASES[name]
        print(json.dumps({name: case()}))


if __name__ == "__main__":
    main()
