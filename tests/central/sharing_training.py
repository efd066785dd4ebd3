"""A run that shares a container with others: says what it has done, and waits for files that the test makes."""

import argparse
import time
from pathlib import Path

import torch
from torch import nn

import paceline as pl


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--wait-after", type=int, default=3, help="steps")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    data = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    trainer = pl.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.01), lambda model, x: (model(x) - x.sum()).pow(2).mean()
    )
    for batch in trainer.batches(data, 4, epochs=2):
        trainer.step(batch)
        if trainer.steps == options.wait_after:
            Path(f"{options.name}-waits").touch()
            while not Path(f"{options.name}-goes-on").exists():
                time.sleep(0.02)
    trainer.ledger.check()
    print(f"{options.name}: {trainer.steps} steps, staleness up to {max(trainer.staleness)}", flush=True)


if __name__ == "__main__":
    main()
