"""A training to attack, with a model for every way of cutting one; nothing in it depends on who computes what.

It tells what must not depend on deaths, pauses and bad links: the ledger's proof, the evaluations, and the model at the
end, which it saves. `--epoch-a-line` lets a test hold it back, so that it does not end before the last attack.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl

SAMPLES, BATCH, CLASSES = 48, 12, 3


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.layers = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(x))[0][:, -1])  # type: ignore[no-any-return]


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 8, sparse=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.table(x)).mean(1))  # type: ignore[no-any-return]


def build(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """A model, and its inputs."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    match kind:
        case "plain":
            layers = [nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES)]
            return nn.Sequential(*layers), torch.randn(SAMPLES, 10, generator=generator)
        case "image":
            layers = [nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Tanh(), nn.Conv2d(6, 4, 3, padding=1)]
            head = [nn.Tanh(), nn.Flatten(), nn.Linear(4 * 64, CLASSES)]
            return nn.Sequential(*layers, *head), torch.randn(SAMPLES, 1, 8, 8, generator=generator)
        case "recurrent":
            return Recurrent(), torch.randint(20, (SAMPLES, 6), generator=generator)
        case "rows":
            return Rows(), torch.randint(200, (SAMPLES, 5), generator=generator)
    raise AssertionError(kind)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["plain", "image", "recurrent", "rows"])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--epoch-a-line", type=Path, help="begin an epoch when this file has a line for it")
    options = parser.parse_args()
    if options.kind != "rows":  # tables are float32
        torch.set_default_dtype(torch.float64)
    model, x = build(options.kind)
    y = torch.arange(SAMPLES) % CLASSES

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        time.sleep(options.pause if model.training else 0.0)
        return F.cross_entropy(model(batch[0]), batch[1])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.0 if options.kind == "rows" else 0.5)
    trainer = pl.Trainer(model, optimizer, loss)
    trainer.resume("last.safetensors")
    evaluations = []
    for epoch in range(options.epochs):
        while options.epoch_a_line and options.epoch_a_line.read_text().count("\n") < epoch:
            time.sleep(0.01)
        for batch in trainer.batches((x, y), BATCH, seed=5):
            trainer.step(batch)
        evaluations.append(trainer.evaluate((x, y), loss, batch_size=8))
        trainer.save("last.safetensors")
    print(json.dumps({"evaluations": evaluations, "ledger": trainer.ledger.check(), "steps": trainer.steps}))


if __name__ == "__main__":
    main()
