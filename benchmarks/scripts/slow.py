"""A small model whose computing is mostly a sleep, as long as its samples are many: four replicas fit on two cores.

One of them, the straggler, sleeps several times as long. Each line of the times is a step: when it ended, how many
steps were closed by then, and how many samples this replica had in it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


def parse(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=96, help="samples an update")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sleep-ms", type=float, default=1.0, help="for each sample")
    parser.add_argument("--straggler", type=int, help="the number of the slow one, if there is one")
    parser.add_argument("--factor", type=float, default=5.0, help="how much slower that is")
    parser.add_argument("--times", type=Path)
    return parser.parse_args()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def make_data(options: argparse.Namespace) -> Batch:
    count = options.batch_size * options.steps
    return torch.randn(count, 64), torch.randint(10, (count,))


class SlowLoss:
    def __init__(self, options: argparse.Namespace, replica: int) -> None:
        factor = options.factor if replica == options.straggler else 1.0
        self._sleep_s = factor * options.sleep_ms / 1000

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        x, y = batch
        time.sleep(self._sleep_s * len(x))
        return F.cross_entropy(model(x), y)


class Log:
    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w", buffering=1) if path is not None else None

    def step(self, closed: int, samples: int) -> None:
        if self._file is not None:
            self._file.write(f"{time.monotonic():.9f} {closed} {samples}\n")
