"""A loop under `pl.distribute` to kill: several chunks a replica, momentum, and for each replica samples of its own."""

from __future__ import annotations

import json
import sys

import torch
from checksum import checksum
from faults import arm, from_argument
from safetensors.torch import save_file
from torch import nn

import paceline as pl

STEPS = 8


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, replica: int, step: int) -> torch.Tensor:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * replica + step))
    return model(x).square().mean()  # type: ignore[no-any-return]


def main() -> None:
    replica = pl.place().rank
    step = 0
    arm(from_argument(sys.argv[1]), replica, lambda: step)
    model, optimizer = pl.distribute(*new_model())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, replica, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    save_file(model.state_dict(), f"model-{replica}.safetensors")
    print(json.dumps({"checksum": checksum(model)}))


if __name__ == "__main__":
    main()
