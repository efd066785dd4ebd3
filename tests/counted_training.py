"""Trains with a loss that is (sum, count), for `test_counted_runs.py`, and tells losses, means, and the parameters."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch import nn

import paceline as pl

SAMPLES, BATCH = 26, 8  # the last batch has 2: fewer than replicas
MANY = float(1 << 20)  # things in a sample, such as pixels


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 6, sparse=True)
        self.last = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.table((x * 1000).long() % 30).mean(1))  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrong", default="", help="what is wrong with the loss")
    parser.add_argument("--table", action="store_true", help="a model with a sparse table, in float32")
    parser.add_argument("--many", action="store_true", help="counts of a million a sample, in float32")
    options = parser.parse_args()

    torch.manual_seed(0)
    layers = nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 4)
    model = Table() if options.table else nn.Sequential(*layers).double()
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, 5, dtype=torch.float64, generator=generator)
    counts = (torch.rand(SAMPLES, dtype=torch.float64, generator=generator) * 2 - 1).clamp(min=0) * 9
    if options.many:
        model, x, counts = model.float(), x.float(), counts.float() * MANY
    if options.wrong == "nothing":
        counts[BATCH : 2 * BATCH] = 0

    def loss(model: nn.Module, batch: Any) -> Any:
        x, counts = batch
        total = ((model(x) - 1).square().sum(1) * counts).sum()
        if options.wrong == "kinds" and trainer.replica == 1:
            return total / counts.sum()
        return {"loss": (total, counts.sum()), "twice": (2 * total, counts.sum())}

    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.0 if options.table else 0.5)
    trainer = pl.Trainer(model, optimizer, loss, clip_norm=None if options.table else 8.0)
    losses, logged = {}, {}
    for batch in trainer.batches((x, counts), BATCH, epochs=2, shuffle=False):
        number = trainer.steps
        losses[number] = trainer.step(batch)
        logged[number] = trainer.logged

    def metric(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": loss(model, batch)["loss"], "first": batch[0][:, 0].mean()}

    found = trainer.evaluate((x, counts), metric, batch_size=3)
    trainer.save("model.safetensors")
    print(json.dumps({"losses": losses, "logged": logged, "found": found}))


if __name__ == "__main__":
    main()
