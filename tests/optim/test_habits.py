"""Habits of scripts with their optimizers: replicas train as one process does, or say that they do not."""

from __future__ import annotations

import pytest

from tests.conftest import Start

EVERYWHERE = ("--replicas 1", "--replicas 2", "--replicas 2 --servers 1", "--replicas 2 --servers 1 --in-graph")

ADDING = """
import torch
from torch import nn
import paceline as pl

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
trainer = pl.Trainer(model, optimizer, lambda model, x: model(x).square().mean())
for number, batch in enumerate(trainer.batches(torch.randn(16, 3), batch_size=4)):
    if number == 2:
        optimizer.add_param_group({"params": model[0].parameters()})
    trainer.step(batch)
"""


def test_a_parameter_that_is_added_in_mid_run_is_refused(start: Start) -> None:
    runs = [start(ADDING, flags) for flags in EVERYWHERE]
    start(ADDING, None).fine()
    for run in runs:
        assert run.end().code == 1
        assert run.sentence.endswith(
            "optimizer is 'SGD with 4 parameters': it had 2 when training began, and owners know no others; give it "
            "all of them at the start, those to be trained later with requires_grad=False"
        )


CYCLING = """
import json, sys
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
import paceline as pl

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
make = {"SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "AdamW": lambda p: torch.optim.AdamW(p)}[sys.argv[1]]
optimizer = make([{"params": model.parameters(), "name": "all", "scale": [1.0]}])
scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=12)
trainer = pl.Trainer(model, optimizer, lambda model, x: model(x).square().mean(), scheduler=scheduler)
data = torch.randn(48, 3, dtype=torch.float64)
losses = [trainer.step(batch) for batch in trainer.batches(data, batch_size=4)]
print(json.dumps({"losses": losses}))
"""


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_cycle_of_rates_and_momenta_is_the_same_with_servers(optimizer: str, start: Start) -> None:
    runs = [start(CYCLING, flags, optimizer) for flags in (None, "--replicas 2", "--replicas 2 --servers 2")]
    plain, mirrored, servers = (run.fine().told("losses") for run in runs)
    assert mirrored == pytest.approx(plain, rel=1e-9)
    assert servers == pytest.approx(plain, rel=1e-9)


FOURIER = """
import json
import torch
from torch import nn
import paceline as pl

class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 40, 40, dtype=torch.complex128) * 0.1)
        self.last = nn.Linear(8, 1).double()

    def forward(self, x):
        waves = torch.einsum("bik,kio->bok", torch.fft.rfft(x), self.weight)
        return self.last(torch.fft.irfft(waves, n=8)).mean(1)

for name, options in {"SGD": {"lr": 0.05, "momentum": 0.9}, "Adam": {"lr": 0.01}, "RMSprop": {"lr": 0.01}}.items():
    torch.manual_seed(0)
    model = Spectrum()
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    trainer = pl.Trainer(model, optimizer, lambda model, x: (model(x) - 1).square().mean(), clip_norm=0.5)
    data = torch.randn(32, 40, 8, dtype=torch.float64)
    print(json.dumps({name: [trainer.step(batch) for batch in trainer.batches(data, batch_size=8, epochs=2)]}))
    trainer.close()
"""


def test_complex_parameters_are_trained_or_refused(start: Start) -> None:
    plain, *mirrored = (start(FOURIER, flags) for flags in (None, "--replicas 1", "--replicas 2"))
    servers = start(FOURIER, "--replicas 2 --servers 1")
    plain.fine()
    for run in mirrored:
        run.fine()
        for name in ("SGD", "Adam", "RMSprop"):
            assert run.told(name) == pytest.approx(plain.told(name), rel=1e-12), name
    assert servers.end().code == 1
    assert servers.sentence.endswith(
        "model is 'weight': it is of type complex128; servers hold float32, float64, bfloat16, float16"
    )
