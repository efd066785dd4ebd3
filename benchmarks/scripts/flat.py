"""A model that is one flat tensor, and the record of when its gradient was ready and when it was exchanged."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn


class Flat(nn.Module):
    """Its gradient is `factor` everywhere after `(model() * factor).backward()`."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def parse(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=400_000)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--times", type=Path, help="write down both times of each repetition, a file a rank")
    return parser.parse_args()


def check(weight: nn.Parameter, expected: float) -> None:
    """A reduction that is fast and wrong is no use."""
    assert weight.grad is not None
    assert weight.grad.eq(expected).all(), f"the gradient is {weight.grad[:4].tolist()}… and not {expected}"


def write(path: Path | None, rank: int, ready: list[float], done: list[float]) -> None:
    if path is not None:
        lines = [f"{a:.9f} {b:.9f}\n" for a, b in zip(ready, done, strict=True)]
        path.with_name(f"{path.name}.{rank}").write_text("".join(lines))
