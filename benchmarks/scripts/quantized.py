"""A model to quantize: python benchmarks/scripts/quantized.py transformer --save model.safetensors

Nothing is trained, since a model's speed does not depend on that: it is measured by how often it agrees with itself.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl


class Transformer(nn.Module):
    """Encoder blocks over words, and one answer."""

    def __init__(self, width: int, depth: int, words: int = 1000, classes: int = 10) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        block = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(text)).mean(1))


def make(options: argparse.Namespace) -> tuple[nn.Module, torch.Tensor]:
    """The model, and what it is asked."""
    if options.model == "transformer":
        return Transformer(options.width, options.depth), torch.randint(1000, (options.samples, options.length))
    layers: list[nn.Module] = []
    for _ in range(options.depth):
        layers += [nn.Linear(options.width, options.width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(options.width, 10)), torch.randn(options.samples, options.width)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def agreement(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=["mlp", "transformer"])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--length", type=int, default=32, help="words of a text")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    model, x = make(options)
    with torch.no_grad():
        y = model.eval()(x).argmax(1)
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    if options.save:
        trainer.save(options.save)
    trainer.evaluate((x, y), agreement, batch_size=32, name="agreement")


if __name__ == "__main__":
    main()
