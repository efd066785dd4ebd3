"""Trains with spare replicas and tells what became of every gradient, for `test_accept_replay.py`.

Somebody else is slow in every few steps, so that different replicas are accepted and different ones are late.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from paceline.central.messages.replies import Settled

SAMPLES, BATCH, EPOCHS, CLIP = 170, 15, 2, 0.5
SLOW_S, CHANGE_S = 0.04, 0.1
DRAW = torch.Generator().manual_seed(9)
X = torch.randn(SAMPLES, 6, generator=DRAW)
Y = torch.randint(3, (SAMPLES,), generator=DRAW)


def new_training() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.8)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y, _ = batch
    return F.cross_entropy(model(x), y)


def main() -> None:
    model, optimizer, scheduler = new_training()

    def slow_at_times(model: nn.Module, batch: Any) -> torch.Tensor:
        if int(time.time() / CHANGE_S) % trainer.replicas == trainer.replica:
            time.sleep(SLOW_S)
        return loss(model, batch)

    trainer = pl.Trainer(model, optimizer, slow_at_times, scheduler=scheduler, clip_norm=CLIP)
    client: Any = trainer._loop.engine.client  # type: ignore[attr-defined]
    report, answers = client.report, []

    def watched(*given: Any) -> Any:
        answers.append(report(*given))
        return answers[-1]

    client.report = watched
    for batch in trainer.batches((X, Y, torch.arange(SAMPLES)), BATCH, epochs=EPOCHS, seed=4):
        trainer.step(batch)
        settled = answers[-1]
        assert isinstance(settled, Settled)
        ids = batch[2].tolist()
        print(json.dumps({"ticket": {"accepted": settled.accepted, "samples": ids, "loss": settled.loss}}))
    print(json.dumps({"steps": trainer.steps, "proof": trainer.ledger.check()}))
    trainer.save("model.safetensors")


if __name__ == "__main__":
    main()
