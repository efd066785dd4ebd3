"""What is cut by image region: `depth` 3×3 convolutions on large images, and a class for every image.

Two ways to use it: training, and `--forward` alone. With `--memory` every process leaves the most memory it took while
it was at it, beyond what it had before, in a file of its own.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]
CLASSES = 10


def parse(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=224, help="pixels a side")
    parser.add_argument("--width", type=int, default=32, help="channels")
    parser.add_argument("--depth", type=int, default=6, help="convolutions")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--forward", action="store_true", help="no training")
    parser.add_argument("--times", type=Path, help="write down when each step ended")
    parser.add_argument("--memory", type=Path, help="write down the memory that each process took, as FILE-PID")
    return parser.parse_args()


def make_model(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    channels = [3, *[options.width] * options.depth]
    layers = [
        layer
        for i in range(options.depth)
        for layer in (nn.Conv2d(channels[i], channels[i + 1], 3, padding=1), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(options.width, CLASSES))


def make_data(options: argparse.Namespace) -> Batch:
    count = options.steps * options.batch_size
    random = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, options.size, options.size, generator=random)
    return images, torch.randint(CLASSES, (count,), generator=random)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


class Memory:
    """The most that this process has taken since this was made, beyond what it had then."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the highest so far
        self._before = _status("VmRSS")

    def write(self) -> None:
        if self._path is not None:
            grown = _status("VmHWM") - self._before
            self._path.with_name(f"{self._path.name}-{os.getpid()}").write_text(str(grown))


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])
