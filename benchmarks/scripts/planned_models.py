"""What plans are checked with: models that no machine is calibrated with.

paceline plan benchmarks/scripts/planned_models.py -- mlp
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[nn.Module, Any], torch.Tensor]


@dataclass
class Case:
    """A model, its data, and how it is trained."""

    model: nn.Module
    data: Batch
    batch_size: int
    loss: Loss
    optimizer: torch.optim.Optimizer


def classify(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def mlp(steps: int) -> Case:
    """1.9M parameters, AdamW."""
    layers = [nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU(), nn.Linear(800, 800), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(800, 10))
    return _case(model, (784,), 96, steps, torch.optim.AdamW(model.parameters(), lr=1e-4))


class Wide(nn.Module):
    """Wide hidden layers, few samples: many weights for each activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList([nn.Linear(640, 2560) for _ in range(3)])
        self.down = nn.ModuleList([nn.Linear(2560, 640) for _ in range(3)])
        self.out = nn.Linear(640, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.relu(up(x)))
        return self.out(x)


def wide(steps: int) -> Case:
    """10M parameters, batches of 8, SGD with momentum."""
    model = Wide()
    return _case(model, (640,), 8, steps, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))


def conv(steps: int) -> Case:
    """Convolutions with BatchNorm on small images."""
    layers: list[nn.Module] = []
    for before, after in ((3, 24), (24, 48), (48, 64)):
        layers += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))
    return _case(model, (3, 32, 32), 64, steps, torch.optim.SGD(model.parameters(), lr=1e-3))


def images(steps: int) -> Case:
    """Convolutions on larger images, few of them."""
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(24, 24, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))
    return _case(model, (3, 112, 112), 4, steps, torch.optim.SGD(model.parameters(), lr=1e-3))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.second(x))))


class Letters(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(depth)))
        self.out = nn.Linear(width, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(self.letters(x)))


def gpt(steps: int) -> Case:
    """A transformer of 6 blocks."""
    model = Letters(160, 6)
    letters = torch.randint(128, (steps * 16, 49))

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    data = (letters[:, :-1].contiguous(), letters[:, 1:].contiguous())
    return Case(model, data, 16, loss, torch.optim.AdamW(model.parameters(), lr=1e-4))


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.LSTM(96, 192, 2, batch_first=True)
        self.out = nn.Linear(192, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.stack(x)[0].mean(1))


def lstm(steps: int) -> Case:
    """Two recurrent layers over 40 time steps."""
    model = Sequences()
    return _case(model, (40, 96), 24, steps, torch.optim.Adam(model.parameters(), lr=1e-4))


def small(steps: int) -> Case:
    """A small model on many samples: one device is best."""
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 10))
    return _case(model, (32,), 16, 20 * steps, torch.optim.SGD(model.parameters(), lr=1e-2))


class Asleep:
    """A device that is not the processor: computing is a sleep, as long as its samples are many."""

    def __init__(self, sleep_ms: float) -> None:
        self._sleep_s = sleep_ms / 1000

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        time.sleep(self._sleep_s * len(batch[0]))
        return classify(model, batch)


def asleep(steps: int, sleep_ms: float = 1.0) -> Case:
    """Computing is a sleep, so that many hosts fit on a few cores; 0.3M parameters."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))
    case = _case(model, (256,), 240, steps, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    case.loss = Asleep(sleep_ms)
    return case


def _case(
    model: nn.Module, shape: tuple[int, ...], batch_size: int, steps: int, optimizer: torch.optim.Optimizer
) -> Case:
    count = steps * batch_size
    return Case(model, (torch.randn(count, *shape), torch.randint(10, (count,))), batch_size, classify, optimizer)


CASES: dict[str, Callable[[int], Case]] = {
    made.__name__: made for made in (mlp, wide, conv, images, gpt, lstm, small, asleep)
} | {"asleep_longer": partial(asleep, sleep_ms=8.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.manual_seed(0)
    case = CASES[options.case](options.steps)
    trainer = pl.Trainer(case.model, case.optimizer, case.loss)
    for batch in trainer.batches(case.data, case.batch_size, epochs=1000, seed=0):
        trainer.step(batch)


if __name__ == "__main__":
    main()
