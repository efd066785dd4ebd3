"""What is trained: the models, the made-up data, the optimizers, and the flags that choose among them.

mlp       784 – width × depth – 10: many parameters, so the exchange and the optimizer weigh
conv      four convolutions with BatchNorm on 32×32 images: few parameters, many small tensors, short steps
compute   `depth` convolutions on 64×64 images: next to no parameters, so the step is all computing
lstm      `depth` stacked layers over 64 time steps, and a class for every sequence
cells     the same, written by hand: a loop over time, with a cell for every layer
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]
CLASSES = 10
IMAGES = {"mlp": (784,), "conv": (3, 32, 32), "compute": (3, 64, 64), "lstm": (64, 512), "cells": (64, 512)}


def parse(description: str | None) -> argparse.ArgumentParser:
    """The flags all training scripts have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(IMAGES), default="mlp")
    parser.add_argument("--width", type=int, default=2048, help="hidden units, or channels")
    parser.add_argument("--depth", type=int, default=4, help="hidden layers (conv always has four)")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--batch-size", type=int, default=32, help="samples a replica, each step")
    parser.add_argument("--steps", type=int, default=30, help="an epoch")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--times", type=Path, help="write down when each step ended")
    return parser


def make_model(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    kinds = {"mlp": _mlp, "conv": _conv, "compute": _compute, "lstm": Recurrent, "cells": Cells}
    return kinds[options.model](options.width, options.depth)


def _mlp(width: int, depth: int) -> nn.Module:
    sizes = [784, *[width] * depth]
    hidden = [layer for i in range(depth) for layer in (nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


def _conv(width: int, depth: int) -> nn.Module:
    channels = [3, width, 2 * width, 4 * width, 4 * width]
    layers: list[nn.Module] = []
    for i in range(4):
        layers += [
            nn.Conv2d(channels[i], channels[i + 1], 3, padding=1, bias=False),
            nn.BatchNorm2d(channels[i + 1]),
            nn.ReLU(),
        ]
        if i < 3:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * 16, CLASSES))


def _compute(width: int, depth: int) -> nn.Module:
    channels = [3, *[width] * depth]
    layers = [
        layer for i in range(depth) for layer in (nn.Conv2d(channels[i], channels[i + 1], 3, padding=1), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(width * 16, CLASSES))


class Recurrent(nn.Module):
    """Some layers of the stack, on the output of those below it; with `classes` the last ones."""

    def __init__(self, width: int, depth: int, inputs: int = IMAGES["lstm"][1], *, classes: int = CLASSES) -> None:
        super().__init__()
        self.stack = nn.LSTM(inputs, width, depth, batch_first=True)
        self.project = nn.Linear(width, classes) if classes else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.stack(x)[0]
        return output if self.project is None else self.project(output.mean(1))


class Cells(nn.Module):
    """The same stack as cells in a loop."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        inputs = [IMAGES["cells"][1], *[width] * (depth - 1)]
        self.cells = nn.ModuleList([nn.LSTMCell(size, width) for size in inputs])
        self.project = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        zeros = x.new_zeros(len(x), self.project.in_features)
        states = [(zeros, zeros)] * len(self.cells)
        tops = []
        for below in x.unbind(1):
            for number, cell in enumerate(self.cells):
                states[number] = cell(below, states[number])
                below, _ = states[number]
            tops.append(below)
        return self.project(torch.stack(tops, 1).mean(1))


def make_optimizer(
    options: argparse.Namespace, model: nn.Module, *, fused: bool | None = None
) -> torch.optim.Optimizer:
    """As most people write it; `fused` is the option of the same name."""
    if options.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=fused)


def make_data(options: argparse.Namespace, replicas: int) -> Batch:
    """As many samples as all replicas together use in an epoch."""
    count = options.steps * options.batch_size * replicas
    random = torch.Generator().manual_seed(1)
    images = torch.randn(count, *IMAGES[options.model], generator=random)
    return images, torch.randint(CLASSES, (count,), generator=random)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)
