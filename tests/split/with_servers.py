"""Trains, evaluates and saves a small network with BatchNorm; every process tells what it has come to."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl

SAMPLES, BATCH_SIZE, EPOCHS = 64, 16, 6
PATH = "model.safetensors"


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 8 * 8, 2),
    )


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Bright at the top, or at the bottom."""
    drawn = torch.Generator().manual_seed(5)
    labels = torch.arange(SAMPLES) % 2
    x = torch.randn(SAMPLES, 1, 8, 8, generator=drawn)
    x[labels == 0, :, :3] += 1.0
    x[labels == 1, :, 5:] += 1.0
    return x, labels


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def measures(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    output = model(batch[0])
    right = (output.argmax(1) == batch[1]).double().mean()
    return {"loss": float(F.cross_entropy(output, batch[1])), "accuracy": float(right)}


def main() -> None:
    model, data = network(), images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.5)
    trainer = pl.Trainer(model, optimizer, loss, scheduler=scheduler, clip_norm=2.0)
    before = trainer.evaluate(data, measures, batch_size=16)
    losses = [trainer.step(batch) for batch in trainer.batches(data, BATCH_SIZE, epochs=EPOCHS, seed=2)]
    after = trainer.evaluate(data, measures, batch_size=16)
    trainer.save(PATH)
    told = {"before": before, "after": after, "steps": trainer.steps, "lr": optimizer.param_groups[0]["lr"]}
    print(json.dumps({**told, "losses": losses, "ledger": trainer.ledger.check()}), flush=True)


if __name__ == "__main__":
    main()
