"""Hosts that exchange every few steps: the mean of what each has come to, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Run, Start
from torch import nn

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root")

SCRIPT = """
import json, torch, torch.nn.functional as F, paceline as pl
from torch import nn
from paceline.run_place import find_place

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(1)
x = torch.randn(80, 6, generator=generator, dtype=torch.float64)
y = (x @ torch.randn(6, 3, generator=generator, dtype=torch.float64)).argmax(1)
loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
trainer = pl.Trainer(model, optimizer, loss)
for batch in trainer.batches((x, y), 8, epochs=1, seed=5, shuffle=False):
    trainer.step(batch)
held = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
print(json.dumps({"held": held}))
print(json.dumps({"ledger": trainer.ledger.check(), "evaluated": trainer.evaluate((x, y), loss, batch_size=16)}))
"""
STEPS, EVERY = 10, 4


def by_hand() -> tuple[dict[str, list[float]], float]:
    """Two hosts that each train on their half of every batch, and take the mean after 4, 8 and (the end) 10 steps."""

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).double()

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(80, 6, generator=generator, dtype=torch.float64)
    y = (x @ torch.randn(6, 3, generator=generator, dtype=torch.float64)).argmax(1)
    models = [fresh(), fresh()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(STEPS):
        for host, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            part = slice(8 * step + 4 * host, 8 * step + 4 * host + 4)
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
        if (step + 1) % EVERY == 0 or step + 1 == STEPS:
            states = [model.state_dict() for model in models]
            mean = {name: (states[0][name] + states[1][name]) / 2 for name in states[0]}
            for model in models:
                model.load_state_dict(mean)
    models[0].eval()
    held = {name: value.flatten().tolist() for name, value in models[0].state_dict().items()}
    return held, F.cross_entropy(models[0](x), y).item()


@pytest.fixture(scope="module")
def run(start: Start) -> Run:
    return start(SCRIPT, f"--replicas 4 --emulate hosts=2,link=1gbit --every {EVERY}").fine(110)


def values(held: dict[str, Any]) -> list[float]:
    return [value for name in sorted(held) for value in held[name]]


def test_two_hosts_of_two_replicas_are_what_the_same_is_by_hand(run: Run) -> None:
    held, evaluated = by_hand()
    for replica in range(4):
        assert values(run.told("held", replica)) == pytest.approx(values(held), rel=1e-10), replica
        assert run.told("evaluated", replica) == pytest.approx(evaluated, rel=1e-10)
        assert run.told("ledger", replica) == "epoch 0: 80 samples, each once"


def test_all_processes_have_the_same_bits_in_the_end(run: Run) -> None:
    assert len({str(run.told("held", replica)) for replica in range(4)}) == 1
    assert Path(run.path, "host-1").is_dir()
