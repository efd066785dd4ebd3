"""A large embedding of which a step touches a few rows, all of them different: so many samples of 32 rows each.

Row j of a step is drawn from the j-th of as many equal parts of the table, so nobody gains by rows that meet.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from traffic import bytes_so_far

WIDTH = 16
ROWS_A_SAMPLE = 32


def parse(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="of the table")
    parser.add_argument("--touched", type=int, default=4096, help="rows a step, of all replicas together")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--times", type=Path, help="write down when each step ended, and bytes sent and received so far"
    )
    return parser


class Model(nn.Module):
    """The mean of the touched rows, and a small dense part."""

    def __init__(self, rows: int, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        # Zeros, which the kernel hands out without a cost, instead of normal numbers, which take seconds.
        self.table = nn.Embedding(rows, WIDTH, sparse=sparse, _weight=torch.zeros(rows, WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.table(ids).mean(1))
        return out


def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return (model(ids) - 1.0).square().mean()


def batch_size(options: argparse.Namespace) -> int:
    return options.touched // ROWS_A_SAMPLE


def make_data(options: argparse.Namespace) -> torch.Tensor:
    """Samples in the order of the steps."""
    part = options.rows // options.touched
    first = torch.arange(options.touched) * part
    random = torch.Generator().manual_seed(1)
    ids = first + torch.randint(part, (options.steps, options.touched), generator=random)
    return ids.view(-1, ROWS_A_SAMPLE)


class Log:
    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w", buffering=1) if path is not None else None

    def step(self) -> None:
        if self._file is not None:
            self._file.write(f"{time.monotonic():.9f} {bytes_so_far()}\n")
