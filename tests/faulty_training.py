"""A training run to kill: several chunks a replica, BatchNorm, momentum, clipping, evaluations, saves.

Prints what must not depend on deaths: losses, evaluations, the ledger's proof, and a checksum of the replica's model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from checksum import checksum
from faults import arm, await_return, from_argument
from torch import nn

import paceline as pl
from paceline.exchange.board import Board
from paceline.run_place import find_place

BATCH = 12


class Watched(nn.Module):
    """Tells when it is in forward, and when in backward."""

    def __init__(self, inner: nn.Sequential) -> None:
        super().__init__()
        self.inner = inner
        self.reached: Callable[[str], None] = lambda moment: None
        # By then half of the gradients are in the arena.
        inner[2].register_full_backward_hook(lambda *_: self.reached("backward"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        self.reached("forward")
        return y


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=from_argument, default=[])
    parser.add_argument("--samples", type=int, default=5 * BATCH)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save", type=Path, default=Path("last.safetensors"))
    parser.add_argument("--await-return", action="store_true", help="take no step while a replica is missing")
    parser.add_argument("--epoch-a-line", type=Path, help="begin an epoch when this file has a line for it")
    parser.add_argument("--counted", action="store_true", help="the loss is (sum, count), and logs a number")
    options = parser.parse_args()

    place = find_place()
    trainer: pl.Trainer | None = None

    def steps() -> int:
        return trainer.steps if trainer is not None else 0

    reached = arm(options.faults, place.rank, steps)
    reached("start")
    torch.manual_seed(0)
    # Three matrices of 200 kB and more: every owner has several chunks. No ReLU: its kink can make of rounding more.
    net = nn.Sequential(nn.Linear(16, 256, bias=False), nn.BatchNorm1d(256), nn.Linear(256, 256), nn.Tanh())
    model = Watched(nn.Sequential(*net, nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 4)))
    model.reached = reached
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(options.samples, 16, generator=generator)
    y = torch.randint(4, (options.samples,), generator=generator)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def counted(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, Any]:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return {"loss": ((losses * batch[1]).sum(), batch[1].sum()), "worst": losses.detach().amax()}

    def metric(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        reached("evaluation")
        return loss(model, batch)

    trainer = pl.Trainer(model, optimizer, counted if options.counted else loss, clip_norm=0.5)
    trainer.resume(options.save)
    board = Board(place.board) if place.board is not None else None
    losses, evaluations = {}, []
    for epoch in range(options.epochs):
        while options.epoch_a_line and options.epoch_a_line.read_text().count("\n") < epoch:
            time.sleep(0.01)
        for batch in trainer.batches((x, y), BATCH, seed=5):
            reached("between")
            number = trainer.steps
            losses[number] = trainer.step(batch)
            if options.await_return and board is not None:
                await_return(board)
        evaluations.append(trainer.evaluate((x, y), metric, batch_size=8))
        trainer.save(options.save)
    print(json.dumps({"losses": losses, "evaluations": evaluations, "checksum": checksum(model)}))
    print(json.dumps({"ledger": trainer.ledger.check(), "steps": trainer.steps}))


if __name__ == "__main__":
    main()
