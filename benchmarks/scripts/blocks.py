"""A transformer of some blocks on made-up words, its data and its loss, and the flags of the scripts that train it."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]
WORDS, HEADS = 256, 4


def parse(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8, help="blocks")
    parser.add_argument("--length", type=int, default=64, help="words of a sample")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--times", type=Path, help="write down when each step ended")
    parser.add_argument("--memory", type=Path, help="write down the most memory a device took, a file a device")
    return parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        heads = self.into(self.first(x)).view(samples, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(samples, length, width))
        return x + self.wide(self.second(x))


class Transformer(nn.Module):
    """The whole, or some of its blocks: with the embedding if they are the first, with the head if the last."""

    def __init__(self, options: argparse.Namespace, blocks: range | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = range(options.depth) if blocks is None else blocks
        width = options.width
        self.words = nn.Embedding(WORDS, width) if blocks.start == 0 else None
        self.places = nn.Embedding(options.length, width) if blocks.start == 0 else None
        self.blocks = nn.ModuleList(Block(width) for _ in blocks)
        last = blocks.stop == options.depth
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, WORDS)) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.words is not None and self.places is not None:
            x = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def make_data(options: argparse.Namespace) -> Batch:
    """As many samples as are used."""
    shape = (options.steps * options.batch_size, options.length + 1)
    words = torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(1))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def cross_entropy(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(found.flatten(0, 1), wanted.flatten())


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])
