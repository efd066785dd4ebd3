"""One process makes each call with something else than the others; all are told so, and go on with the next trainer.

Run by `test_same_calls.py`. The last difference ends the run.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import paceline as pl

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
ODD = pl.place().rank == 1


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> torch.Tensor:
        return X[index]


class SameRows(Rows):
    """Another class."""


class Files(Rows):
    """As users list them, each process in an order of its own."""

    def __init__(self) -> None:
        self.names = [f"{index}.png" for index in range(len(X))]
        random.Random(int(ODD)).shuffle(self.names)


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """As a library splits it by rank, where there are RANK and WORLD_SIZE."""

    def __init__(self, begin: int, every: int) -> None:
        self.begin, self.every = begin, every

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(X[self.begin :: self.every])


def told(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")


def new_trainer(**options: Any) -> pl.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return pl.Trainer(model, optimizer, lambda model, x: model(x).square().mean(), **options)


def train(dataset: Any = X, batch_size: int = 4, options: dict[str, Any] | None = None, **call: Any) -> None:
    trainer = new_trainer(**options or {})
    for batch in trainer.batches(dataset, batch_size, **call):
        trainer.step(batch)
        told(stepped=True)


def evaluate(dataset: Any) -> None:
    new_trainer().evaluate(dataset, lambda model, x: model(x).mean(), batch_size=8)


def evaluate_by(metric: Any) -> None:
    new_trainer().evaluate(X, metric, batch_size=8)


def smallest(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).min()


def largest(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).max()


def mean_and_largest(model: nn.Module, x: torch.Tensor) -> Any:
    found = model(x)
    return {"mean": found.mean(), "largest": found.max()} if ODD else {"mean": found.mean()}


def one_loop_more() -> None:
    trainer = new_trainer()
    for length in (40, 8, 40) if ODD else (40, 40):
        for batch in trainer.batches(X[:length], 4):
            trainer.step(batch)


def in_another_order() -> None:
    trainer = new_trainer()
    for length in (8, 40) if ODD else (40, 8):
        for batch in trainer.batches(X[:length], 4):
            trainer.step(batch)


CASES = {
    "seed": lambda: train(seed=int(ODD)),
    "length": lambda: train(X[: 39 if ODD else 38], drop_last=True),
    "batch_size": lambda: train(batch_size=8 if ODD else 4),
    "epochs": lambda: train(epochs=2 if ODD else 1),
    "shuffle": lambda: train(shuffle=ODD),
    "drop_last": lambda: train(X[:39], drop_last=ODD),
    "values": lambda: train(X + int(ODD)),
    "indices": lambda: train(torch.utils.data.Subset(Rows(), range(ODD, 39 + ODD))),
    "pairs": lambda: train(
        sorted(zip(X, range(40), strict=True), key=lambda pair: pair[1], reverse=ODD),
        collate=lambda pairs: torch.stack([x for x, _ in pairs]),
    ),
    "files": lambda: train(Files()),
    "stream": lambda: train(Stream(ODD, 2)),
    "class": lambda: train(SameRows() if ODD else Rows()),
    "accumulate": lambda: train(options={"accumulate": 2 if ODD else 1}),
    "clip_norm": lambda: train(options={"clip_norm": 0.5 if ODD else 1.0}),
    "order": in_another_order,
    "more": one_loop_more,
    "evaluation length": lambda: evaluate(X[: 39 if ODD else 40]),
    "evaluation values": lambda: evaluate(X + int(ODD)),
    "evaluation batch_size": lambda: new_trainer().evaluate(X, mean_and_largest, batch_size=8 + ODD),
    "evaluation metric": lambda: evaluate_by(smallest if ODD else largest),
    "evaluation returns": lambda: evaluate_by(mean_and_largest),
}


def main() -> None:
    for name, case in CASES.items():
        try:
            case()
            told(**{name: None})
        except pl.PacelineError as error:
            told(**{name: str(error)})
    train(seed=7 + ODD)


if __name__ == "__main__":
    main()
