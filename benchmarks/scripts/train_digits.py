"""Digits of examples/digits.py, with plain SGD: paceline run train_digits.py --replicas 4 --servers 1 --async -- --lr 2

Writes the test accuracy after every few epochs, and how many gradients had which staleness. Every gradient takes
`--sleep-ms` longer than it needs, on average: replicas are equally fast though there are more of them than cores, but
do not keep step. If they did, each would push just before the others, and see their updates when it pulls.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch
from torch import nn

import paceline as pl

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import digits

WIDTH = 128


def make_model(mean: torch.Tensor) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        Centre(mean), nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )


class Centre(nn.Module):
    def __init__(self, mean: torch.Tensor) -> None:
        super().__init__()
        self._mean = mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self._mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--look-every", type=int, default=1, help="epochs between two evaluations")
    parser.add_argument("--sleep-ms", type=float, default=5.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    train_set, test_set = digits.digits()
    model = make_model(train_set[0].mean(0))

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        time.sleep(random.uniform(0.5, 1.5) * options.sleep_ms / 1000)
        return digits.loss(model, batch)

    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=options.lr), loss)
    curve = []
    for epoch in range(options.look_every, options.epochs + 1, options.look_every):
        for batch in trainer.batches(train_set, options.batch_size, epochs=options.look_every):
            trainer.step(batch)
        curve.append((epoch * len(train_set[0]), trainer.evaluate(test_set, digits.accuracy)))
    if trainer.chief:
        options.out.write_text(json.dumps({"curve": curve, "staleness": trainer.staleness}))


if __name__ == "__main__":
    main()
