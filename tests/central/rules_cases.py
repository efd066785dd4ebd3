"""Sync trainings with spare replicas, one after another, for `test_rules_live.py`. Replica 3 is the slow one."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from async_cases import together, told
from torch import nn

import paceline as pl
from paceline.central.messages.replies import Settled
from paceline.rules import Rule, Sync

SLOW, DIES = 3, 2
QUICK_S = 0.01
X = torch.randn(480, 4, generator=torch.Generator().manual_seed(6))
AWKWARD = [(1, 1), (3, 7), (5, 4), (7, 3), (10, 4), (13, 5), (9, 2)]  # samples, and samples a batch


class Fleet:
    """A trainer whose replica 3 takes longer, and what became of this replica's tickets."""

    def __init__(self, rule: Rule, slow_s: float, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1) if model is None else model
        self.slow_s = slow_s
        self.shift = 0.0  # of what the slow one sees
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.trainer = pl.Trainer(self.model, optimizer, self.loss)
        self.trainer.rule = rule
        self.accepted: list[bool] = []
        self.needed: list[int] = []
        together(self.trainer)

    def loss(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        slow = self.trainer.replica == SLOW
        time.sleep(self.slow_s if slow else QUICK_S)
        x = x + self.shift if slow else x
        return model(x).square().mean()  # type: ignore[no-any-return]

    def train(self, data: torch.Tensor, batch_size: int, epochs: int = 1, dies_after: int = 0) -> None:
        client = self.trainer._loop.engine.client  # type: ignore[attr-defined]
        report = client.report

        def watched(*given: Any) -> Any:
            answer = report(*given)
            if isinstance(answer, Settled):
                self.accepted.append(answer.accepted is not None)
            return answer

        client.report = watched
        for batch in self.trainer.batches(data, batch_size, epochs=epochs):
            self.needed.append(self.trainer._loop._drawn.batches[0].work.assignment.needed)  # type: ignore[attr-defined]
            self.trainer.step(batch)
            if len(self.needed) == dies_after and self.trainer.replica == DIES:
                os.kill(os.getpid(), signal.SIGKILL)
        client.report = report


def spare() -> dict[str, Any]:
    fleet = Fleet(Sync(3), 5 * QUICK_S)
    fleet.train(X, 12, epochs=1)
    return told(fleet.trainer, accepted=fleet.accepted, accepting=fleet.trainer.accepting)


def auto() -> dict[str, Any]:
    fleet = Fleet(Sync("auto"), 5 * QUICK_S)
    fleet.train(X, 12, epochs=2)
    return told(fleet.trainer, needed=fleet.needed)


def awkward(rule: Rule) -> Callable[[], dict[str, Any]]:
    def case() -> dict[str, Any]:
        fleet = Fleet(rule, 0.003)
        proofs = []
        for length, batch_size in AWKWARD:
            fleet.train(X[:length], batch_size, epochs=2)
            proofs.append(fleet.trainer.ledger.check())
        return told(fleet.trainer, proofs=proofs)

    return case


def statistics() -> dict[str, Any]:
    """Replica 3 sees quite other numbers, and takes so long that it is never accepted."""
    norm = nn.BatchNorm1d(4, momentum=1.0)
    fleet = Fleet(Sync(3), 2.0, nn.Sequential(norm, nn.Linear(4, 1)))
    fleet.shift = 1000.0
    fleet.train(X[:120], 12)
    assert norm.running_mean is not None
    return told(fleet.trainer, accepted=fleet.accepted, means=norm.running_mean.tolist())


def a_death() -> dict[str, Any]:
    fleet = Fleet(Sync(3), QUICK_S)
    fleet.train(X[:120], 12, epochs=2, dies_after=5)
    return told(fleet.trainer)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "spare": spare,
    "auto": auto,
    "accept 1": awkward(Sync(1)),
    "accept 2": awkward(Sync(2)),
    "accept 3": awkward(Sync(3)),
    "accept 4": awkward(Sync(4)),
    "accept auto": awkward(Sync("auto")),
    "statistics": statistics,
    "a death": a_death,  # the last one: afterwards there are only three
}


def main() -> None:
    for name, case in CASES.items():
        print(json.dumps({name: case()}))


if __name__ == "__main__":
    main()
