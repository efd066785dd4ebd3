"""What is cut by dimension: `depth` blocks width → hidden → width, and their output is to become a target.

Two ways to use it: training, and `--forward` alone, as for single requests.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]
DIMS = {"*.fc1.weight": "hidden embed"}


def parse(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--depth", type=int, default=4, help="blocks")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--forward", action="store_true", help="no training")
    parser.add_argument("--times", type=Path, help="write down when each step ended")
    return parser


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc2(F.gelu(self.fc1(x)))
        return y


def make_model(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(options.width, options.hidden) for _ in range(options.depth)))


def make_optimizer(model: nn.Module, *, fused: bool | None = None) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=fused)


def make_data(options: argparse.Namespace) -> Batch:
    random = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, options.steps * options.batch_size, options.width, generator=random)
    return x, y


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def go(
    options: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, watch: Callable[[], None]
) -> None:
    """In plain torch, whatever the parameters are."""
    x, y = make_data(options)
    model.train(not options.forward)
    for rows in torch.arange(len(x)).split(options.batch_size):
        if options.forward:
            with torch.no_grad():
                model(x[rows])
        else:
            optimizer.zero_grad()
            loss(model, (x[rows], y[rows])).backward()
            optimizer.step()
        watch()
