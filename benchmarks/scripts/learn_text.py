"""A small transformer on characters: paceline run learn_text.py --replicas 2 --emulate hosts=2,link=100mbit

It reads texts that come with every Python, and writes how far its loss on others of them has come, and when.
"""

import argparse
import json
import pydoc_data.topics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from learn_digits import sent_bytes
from torch import nn

import paceline as pl

LENGTH = 32


def text() -> torch.Tensor:
    """Returns the language reference's topics as characters by number, rare ones as 0."""
    whole = "\n".join(entry for _, entry in sorted(pydoc_data.topics.topics.items()))
    known = {chr(code): number for number, code in enumerate(range(32, 127), start=1)}
    return torch.tensor([known.get(letter, 0) for letter in whole])


class Reader(nn.Module):
    """Says of every character which one comes next."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(96, width)
        self.places = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.project = nn.Linear(width, 96)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        found = self.letters(letters) + self.places(torch.arange(LENGTH))
        answer: torch.Tensor = self.project(self.layers(found, mask=mask, is_causal=True))
        return answer


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", type=float, default=0.0, help="at which it stops")
    parser.add_argument("--steps", type=int, default=240, help="at most")
    parser.add_argument("--look-every", type=int, default=40, help="steps between two evaluations")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    model = Reader(options.width, options.depth)
    trainer = pl.Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss)
    letters = text()
    lines = letters[: len(letters) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    edge = len(lines) * 9 // 10
    train_set, test_set = lines[:edge], lines[edge : edge + 256]
    at_once = options.look_every * options.batch_size
    before, began, found = sent_bytes(), time.monotonic(), 0.0
    for look in range(-(-options.steps // options.look_every)):
        start = look * at_once % (len(train_set) - at_once)
        for batch in trainer.batches(train_set[start : start + at_once], options.batch_size, seed=look):
            trainer.step(batch)
        found = trainer.evaluate(test_set, loss, batch_size=64)
        if found <= options.loss:
            break
    if trainer.chief:
        seconds, sent = time.monotonic() - began, sent_bytes() - before
        reached = found <= options.loss
        told = {"steps": trainer.steps, "bytes": sent, "seconds": seconds, "reached": reached, "value": found}
        options.out.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
