"""A training run for hosts of an engine: tells its losses and the sum of its parameters, in float64."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import paceline as pl


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--slowly", type=Path, help="a step takes a moment, and this file says that the third is made")
    parser.add_argument("--mistake", type=int, help="replica that raises at the fourth step")
    parser.add_argument("--killed", type=int, help="replica that is killed at its second step, the first time")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(60, 10, dtype=torch.float64, generator=generator)
    y = x.sum(1, keepdim=True)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    trainer = pl.Trainer(model, optimizer, loss)
    losses: list[float] = []
    for made, batch in enumerate(trainer.batches((x, y), 12, epochs=options.epochs), 1):
        losses.append(trainer.step(batch))
        if options.slowly is not None:
            time.sleep(0.05)
            if trainer.steps == 3:
                options.slowly.touch()
        if options.mistake == trainer.replica and trainer.steps >= 4:
            raise RuntimeError("a mistake of the script")
        if options.killed == trainer.replica and made == 2 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    trainer.ledger.check()
    found = sum(parameter.detach().square().sum().item() for parameter in model.parameters())
    print(json.dumps({"losses": losses, "parameters": found, "steps": trainer.steps}))


if __name__ == "__main__":
    main()
