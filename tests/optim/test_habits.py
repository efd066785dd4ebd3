"""Habits of scripts with their optimizers: replicas train as one process does, or say that they do not."""

from __future__ import annotations

import pytest

from tests.conftest import Run, Start

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


WRITING = """
import torch
from torch import nn
import paceline as pl

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).square().mean())
for batch in trainer.batches(torch.randn(16, 3), batch_size=4):
    trainer.step(batch)
    if "WRITES":
        model[1].weight.data.mul_(0.9)
"""
QUIET = WRITING.replace("WRITES", "")


def test_what_a_script_writes_between_steps_to_parameters_that_replicas_share_is_told(start: Start) -> None:
    quiet = [start(WRITING, None), start(QUIET, "--replicas 2"), start(WRITING, "--replicas 1")]
    told = start(WRITING, "--replicas 2").fine()
    for replica in range(2):
        said = "the script has written to parameter '1.weight' between two steps: replicas of a host share their"
        assert told.log(replica).count(said) == 1
    for run in quiet:
        assert "the script has written" not in run.fine().err


def test_with_servers_it_is_told_where_they_share_their_memory(start: Start) -> None:
    one_script = ["--servers 1 --replicas 1", "--servers 1 --replicas 2 --in-graph"]
    quiet = [start(QUIET, "--servers 2 --replicas 2"), *(start(WRITING, flags) for flags in one_script)]
    told = start(WRITING, "--servers 2 --replicas 2").fine()
    said = (
        "the script has written to parameter '1.weight' between two steps, and with servers it is theirs: what it does"
    )
    for replica in range(2):
        assert told.log(replica).count(said) == 1
    for run in quiet:
        assert "the script has written" not in run.fine().err


@pytest.mark.parametrize("flags", ["--async", "--exchange tcp", "--async --in-graph"])
def test_with_servers_it_is_refused_where_it_would_be_lost(start: Start, flags: str) -> None:
    writing, fine = (start(text, f"--servers 1 --replicas 2 {flags}") for text in (WRITING, QUIET))
    assert writing.end().code == 1
    assert "this replica has only a copy of it, and what was written is lost" in writing.end().err
    fine.fine()


def test_a_parameter_that_is_no_number_is_not_taken_for_a_written_one(start: Start) -> None:
    unused = 'model.register_parameter("unused", nn.Parameter(torch.full((3,), torch.nan)))\ntrainer ='
    run = start(QUIET.replace("trainer =", unused), "--servers 1 --replicas 2 --async").fine()
    assert "the script has written" not in run.err + run.log(0) + run.log(1)


# With servers the last of it is refused: one launch of a strategy tells of all.
TRAINING = """
import json
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
import paceline as pl

def cycle(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = make([{"params": model.parameters(), "name": "all", "scale": [1.0]}])
    scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=12)
    trainer = pl.Trainer(model, optimizer, lambda model, x: model(x).square().mean(), scheduler=scheduler)
    data = torch.randn(48, 3, dtype=torch.float64)
    losses = [trainer.step(batch) for batch in trainer.batches(data, batch_size=4)]
    trainer.close()
    return losses

print(json.dumps({"a cycle of SGD": cycle(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))}))
print(json.dumps({"a cycle of AdamW": cycle(torch.optim.AdamW)}))

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


@pytest.fixture(scope="module")
def plain(start: Start) -> Run:
    return start(TRAINING, None).fine()


@pytest.fixture(scope="module", params=["--replicas 1", "--replicas 2"])
def mirrored(request: pytest.FixtureRequest, start: Start) -> Run:
    return start(TRAINING, request.param).fine()


@pytest.fixture(scope="module")
def servers(start: Start) -> Run:
    return start(TRAINING, "--replicas 2 --servers 2").end()


@pytest.mark.parametrize("name", ["a cycle of SGD", "a cycle of AdamW"])
def test_a_cycle_of_rates_and_momenta_is_the_same(name: str, mirrored: Run, servers: Run, plain: Run) -> None:
    for run in (mirrored, servers):
        assert run.told(name) == pytest.approx(plain.told(name), rel=1e-9)


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop"])
def test_complex_parameters_are_trained(name: str, mirrored: Run, plain: Run) -> None:
    assert mirrored.told(name) == pytest.approx(plain.told(name), rel=1e-12)


def test_complex_parameters_are_refused_by_servers(servers: Run) -> None:
    assert servers.code == 1
    assert servers.sentence.endswith(
        "model is 'weight': it is of type complex128; servers hold float32, float64, bfloat16, float16"
    )
