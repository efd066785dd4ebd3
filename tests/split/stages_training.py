"""Trains a small language model and tells its losses: run under `paceline run`, with stages or without."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import paceline as pl

WIDTH, WORDS, LENGTH = 16, 23, 6


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.wide = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        x = x + self.dropout(self.attention(normed, normed, normed, need_weights=False)[0])
        return x + self.dropout(self.wide(x))


class Language(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*[Block(dropout) for _ in range(4)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(words)
        if noise is not None:
            x = x + noise
        return self.head(self.blocks(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=37)
    options = parser.parse_args()

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        words, targets = batch
        if not options.noise:
            return F.cross_entropy(model(words).transpose(1, 2), targets)
        noise = options.noise * torch.randn(*words.shape, WIDTH)
        return F.cross_entropy(model(words, noise).transpose(1, 2), targets) + noise.square().mean()

    def metric(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])

    # In float64 the gradients that are nothing but rounding are too small for AdamW to make full steps of them.
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = tuple(torch.randint(WORDS, (options.samples, LENGTH)) for _ in range(2))
    model = Language(options.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = pl.Trainer(model, optimizer, loss, clip_norm=0.5, accumulate=options.accumulate)
    losses = []
    for batch in trainer.batches(data, 16, epochs=options.epochs):
        losses.append(trainer.step(batch))
        if len(losses) == 3 and options.epochs > 10:
            told = Path(f"steps-of-{trainer.device}.new")
            told.write_text(str(os.getpid()))
            told.rename(f"steps-of-{trainer.device}")
    evaluated = trainer.evaluate(data, metric, batch_size=10)
    print(json.dumps({"losses": losses, "evaluated": evaluated}))
    trainer.save("model.safetensors")
    if trainer.chief:
        plain = Language(0.0)
        plain.load_state_dict(load_file("model.safetensors"))
        save_file({name: tensor.clone() for name, tensor in plain.state_dict().items()}, "plain.safetensors")


if __name__ == "__main__":
    main()
