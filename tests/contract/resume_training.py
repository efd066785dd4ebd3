"""Trains two epochs with an evaluation after each, for `test_resume_matrix.py`.

With `--save PATH` it ends in the middle of the second epoch, and saves. With `--resume FOLDER` it goes on from every
checkpoint in that folder, one after another. Each training tells where it began, what was drawn of random numbers, the
evaluations as the script sees them, and every loss.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl

SAVE_AT = 6  # updates: two into the second epoch of four


def train(save: Path | None = None, resume: Path | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    random.seed(0)
    x = torch.randn(64, 8, dtype=torch.float64)
    y = x.sin().sum(1, keepdim=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7], gamma=0.5)
    trainer = pl.Trainer(model, optimizer, lambda m, b: F.mse_loss(m(b[0]), b[1]), scheduler=scheduler, clip_norm=2.0)
    told: dict[str, Any] = {"began": None, "drawn": {}, "evaluations": [], "losses": {}, "rates": {}}
    if resume is not None:
        assert trainer.resume(resume)
    for _ in range(2):
        for batch in trainer.batches((x, y), 16, seed=3):
            number = trainer.steps
            told["began"] = number if told["began"] is None else told["began"]
            told["drawn"][number] = [random.random(), torch.rand(1).item()]
            told["rates"][number] = optimizer.param_groups[0]["lr"]
            told["losses"][number] = trainer.step(batch)
            if save is not None and trainer.steps == SAVE_AT:
                trainer.save(save)
                trainer.close()
                return told
        told["evaluations"].append(trainer.evaluate((x, y), measure))
    told["ledger"] = trainer.ledger.check()
    trainer.close()
    return told


def measure(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    error = model(batch[0]) - batch[1]
    return {"square": error.square().mean(), "mean": error.mean()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=Path)
    parser.add_argument("--resume", type=Path)
    options = parser.parse_args()
    if options.resume is None:
        print(json.dumps({"whole" if options.save is None else "saved": train(save=options.save)}))
    for path in sorted(options.resume.glob("*-of.safetensors")) if options.resume else ():
        print(json.dumps({path.stem.removesuffix("-of"): train(resume=path)}))


if __name__ == "__main__":
    main()
