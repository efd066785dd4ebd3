"""Evaluations and requests that come before the first batch that is trained on are computed by all devices together."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from conftest import Start

SCRIPT = """
import json, sys
import torch, torch.nn as nn
from torch.utils.flop_counter import FlopCounterMode
import paceline as pl

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)

class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.out = nn.ModuleList(nn.GRUCell(8, 8) for _ in range(2)), nn.Linear(8, 3)
    def forward(self, x):
        states = [torch.zeros(len(x), 8) for _ in self.cells]
        for step in range(x.shape[1]):
            below = x[:, step]
            for number, cell in enumerate(self.cells):
                below = states[number] = cell(below, states[number])
        return self.out(below)

kind, asks_first = sys.argv[1], int(sys.argv[2])
if kind == "wide":
    model, x = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3)), torch.randn(24, 6)
elif kind == "images":
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))
    x = torch.randn(24, 2, 12, 12)
else:
    model, x = Cells(), torch.randn(24, 6, 8)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).square().mean())
told, ask = {}, trainer.predictor()
if trainer.replica >= asks_first:
    ask(x[:4])  # captured, compared
    with FlopCounterMode(display=False) as counted:
        answer = ask(x[:4])
    told["flops"] = counted.get_total_flops()
    told["off"] = (answer - trainer.predict(x[:4])).abs().max().item()
told["before"] = trainer.evaluate(x, lambda model, x: model(x).square().mean())
for batch in trainer.batches(x, batch_size=8, epochs=1):
    trainer.step(batch)
told["after"] = trainer.evaluate(x, lambda model, x: model(x).square().mean())
print(json.dumps(told))
"""


Alone = Callable[[str], dict[str, float]]


@pytest.fixture(scope="module")
def alone(start: Start) -> Alone:
    """What one process tells of a model of that kind."""
    return functools.cache(lambda kind: start(SCRIPT, None, f"{kind} 0").fine().said(0)[0])


def assert_trained_alike(found: dict[str, float], alone: dict[str, float]) -> None:
    assert (found["before"], found["after"]) == pytest.approx((alone["before"], alone["after"]), rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "flags", "most"),
    [
        ("wide", "--mesh model=2 --layout hidden=model", 0.5),
        ("images", "--tiles 2", 0.6),  # and the rows that it computes for its neighbour
    ],
)
def test_a_device_computes_its_part_of_what_comes_before_training(
    start: Start, alone: Alone, kind: str, flags: str, most: float
) -> None:
    cut = start(SCRIPT, flags, f"{kind} 0").fine()
    for device in (0, 1):
        (found,) = cut.said(device)
        assert found["flops"] <= most * alone(kind)["flops"]
        assert found["off"] < 1e-12
        assert_trained_alike(found, alone(kind))


def test_the_devices_of_one_replica_need_no_other_for_it(start: Start, alone: Alone) -> None:
    cut = start(SCRIPT, "--replicas 2 --wavefront 2", "cells 1").fine()
    for device in range(4):
        (found,) = cut.said(device)
        assert_trained_alike(found, alone("cells"))
        assert ("off" in found) == (device >= 2)
        if device >= 2:
            assert found["off"] < 1e-12
            assert found["flops"] <= 0.6 * alone("cells")["flops"]


def test_nor_with_servers(start: Start, alone: Alone) -> None:
    script = SCRIPT.replace("trainer.predictor()", "None")  # there is none
    cut = start(script, "--replicas 2 --wavefront 2 --servers 1", "cells 2").fine()
    for device in range(4):
        (found,) = cut.said(device)
        assert_trained_alike(found, alone("cells"))


NUMBERS = """
import torch, torch.nn as nn
import paceline as pl

torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3)), torch.ones(24, 6)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).square().mean())
print('{"ones": %r, "whole": %r}' % (
    trainer.evaluate(x, lambda model, x: 1.0), trainer.evaluate(x, lambda model, x: float(len(model(x)) > 3))
))
"""


@pytest.mark.parametrize("flags", ["--mesh model=2 --layout hidden=model", "--tiles 2"])
def test_a_metric_that_cannot_be_cut_is_computed_whole(start: Start, flags: str) -> None:
    """What is wrong with the cut, as here with tiles of no image, is said when training begins."""
    run = start(NUMBERS, flags).fine()
    for device in (0, 1):
        assert run.said(device) == [{"ones": 1.0, "whole": 1.0}]
