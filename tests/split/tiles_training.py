"""Trains a small image model under whatever it was started with, and says what came of it; for tests.

It has what could go wrong when images are cut: statistics over the batch, dropout before and after the head, a
branch, a gate, uneven rows, a last batch that is smaller.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 5, padding=2, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(dropout)
        self.branch = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4, bias=False)
        self.gate = nn.Linear(8, 8)
        self.down = nn.Conv2d(16, 6, 3, stride=2, bias=False)
        self.norm_down = nn.BatchNorm2d(6, momentum=None)
        self.pool = nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)
        self.head = nn.Sequential(
            nn.Flatten(), nn.LazyLinear(12, bias=False), nn.BatchNorm1d(12), nn.Dropout(dropout), nn.Linear(12, 5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(F.relu(self.norm(self.first(x))))
        gate = torch.sigmoid(self.gate(x.mean((2, 3))))
        x = torch.cat([x * gate[:, :, None, None], x + self.branch(x)], 1)
        x = F.relu(self.norm_down(self.down(x)))
        return self.head(self.pool(x))  # type: ignore[no-any-return]


def make(dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    net = Net(dropout)
    net(torch.zeros(2, 3, 15, 18))
    return net


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y) + 1e-3 * sum(p.square().sum() for p in model.parameters())


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    x, y = batch
    out = model(x)
    return {"loss": float(F.cross_entropy(out, y)), "right": float((out.argmax(1) == y).double().mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--double", action="store_true", help="in float64, where rounding stays rounding")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64 if options.double else torch.float32)
    model = make(options.dropout)
    random = torch.Generator().manual_seed(1)
    data = torch.randn(14, 3, 15, 18, generator=random), torch.randint(5, (14,), generator=random)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trainer = pl.Trainer(model, optimizer, loss, clip_norm=1.0)
    before = trainer.evaluate(data, accuracy, batch_size=4)
    losses = [trainer.step(batch) for batch in trainer.batches(data, 6, epochs=2)]
    trainer.save("model.safetensors")
    print(json.dumps({"losses": losses, "before": before, "after": trainer.evaluate(data, accuracy, batch_size=4)}))


if __name__ == "__main__":
    main()
