"""Hosts that exchange every few steps: the mean of what each has come to, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Run, Start
from torch import nn

from paceline.mirrored.gossip import partner

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root")

SCRIPT = """
import json, sys, torch, torch.nn.functional as F, paceline as pl
from torch import nn
from paceline.run_place import find_place

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).double()
model.register_buffer("number", torch.tensor(0.5))
model.register_buffer("turned", torch.arange(6.0).view(2, 3).T)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(1)
x = torch.randn(80, 6, generator=generator, dtype=torch.float64)
y = (x @ torch.randn(6, 3, generator=generator, dtype=torch.float64)).argmax(1)
loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
if "as-if" in sys.argv:  # everybody takes the CPU for an accelerator
    import paceline.mirrored.opening as opening
    opening.device_of = lambda model: torch.device("xla:0")
trainer = pl.Trainer(model, optimizer, loss)
try:
    for batch in trainer.batches((x, y), 8, epochs=100000 if "long" in sys.argv else 1, seed=5, shuffle=False):
        trainer.step(batch)
finally:  # it may have been stopped
    held = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    print(json.dumps({"held": held}))
print(json.dumps({"ledger": trainer.ledger.check(), "evaluated": trainer.evaluate((x, y), loss, batch_size=16)}))
"""
STEPS, EVERY = 10, 4


Held = dict[str, torch.Tensor]


def mean(states: Sequence[Held]) -> Held:
    return {name: torch.stack([state[name] for state in states]).double().mean(0) for name in states[0]}


def by_hand(
    hosts: int, exchange: Callable[[int, list[Held]], list[Held] | None], made: int = STEPS
) -> tuple[dict[str, list[float]], float]:
    """Hosts that each train on their part of every batch; `exchange(steps, states)` is what they then go on from."""

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).double()
        model.register_buffer("number", torch.tensor(0.5))
        model.register_buffer("turned", torch.arange(6.0).view(2, 3).T)
        return model

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(80, 6, generator=generator, dtype=torch.float64)
    y = (x @ torch.randn(6, 3, generator=generator, dtype=torch.float64)).argmax(1)
    models = [fresh() for _ in range(hosts)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(made):
        for host, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            size = 8 // hosts
            part = slice(8 * step + size * host, 8 * step + size * (host + 1))
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
        states = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
        for model, state in zip(models, exchange(step + 1, states) or states, strict=True):
            model.load_state_dict(state)
    model = fresh()
    model.load_state_dict(mean([model.state_dict() for model in models]))
    model.eval()
    held = {name: value.flatten().tolist() for name, value in model.state_dict().items()}
    return held, F.cross_entropy(model(x), y).item()


def mean_of_all(steps: int, states: list[Held]) -> list[Held] | None:
    """After 4, 8 and (the end) 10 steps."""
    return [mean(states)] * len(states) if steps % EVERY == 0 or steps == STEPS else None


class OuterSteps:
    """The mean change is the gradient of torch's own SGD with Nesterov's momentum."""

    def __init__(self) -> None:
        self.common: list[torch.Tensor] = []

    def __call__(self, steps: int, states: list[Held]) -> list[Held] | None:
        if not self.common:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).double()
            self.names = [name for name, _ in model.named_parameters()]
            self.common = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
            self.outer = torch.optim.SGD(self.common, lr=0.7, momentum=0.9, nesterov=True)
        if steps % EVERY and steps != STEPS:
            return None
        found = mean(states)
        for name, parameter in zip(self.names, self.common, strict=True):
            parameter.grad = parameter.detach() - found[name]
        self.outer.step()
        stepped = {name: value.detach().clone() for name, value in zip(self.names, self.common, strict=True)}
        return [{**found, **stepped}] * len(states)


def mean_with_one(steps: int, states: list[Held]) -> list[Held]:
    met = [partner(host, len(states), steps - 1) for host in range(len(states))]
    return [
        mean([states[host], states[other]]) if other is not None else states[host] for host, other in enumerate(met)
    ]


@pytest.fixture(scope="module")
def run(start: Start) -> Run:
    return start(SCRIPT, f"--replicas 4 --emulate hosts=2,link=1gbit --every {EVERY}").fine(110)


def values(held: dict[str, Any]) -> list[float]:
    return [value for name in sorted(held) for value in held[name]]


@needs_root
def test_two_hosts_of_two_replicas_are_what_the_same_is_by_hand(run: Run) -> None:
    held, evaluated = by_hand(2, mean_of_all)
    for replica in range(4):
        assert values(run.told("held", replica)) == pytest.approx(values(held), rel=1e-10), replica
        assert run.told("evaluated", replica) == pytest.approx(evaluated, rel=1e-10)
        assert run.told("ledger", replica) == "epoch 0: 80 samples, each once"


@needs_root
def test_all_processes_have_the_same_bits_in_the_end(run: Run) -> None:
    assert len({str(run.told("held", replica)) for replica in range(4)}) == 1
    assert Path(run.path, "host-1").is_dir()


@needs_root
@pytest.mark.parametrize(
    ("flags", "exchange"),
    [(f"--every {EVERY}", mean_of_all), ("--gossip", mean_with_one)],
    ids=["every", "gossip"],
)
def test_a_model_on_a_device_has_there_what_hosts_took_the_mean_of(
    start: Start, flags: str, exchange: Callable[[int, list[Held]], list[Held] | None]
) -> None:
    run = start(SCRIPT, f"--replicas 2 --emulate hosts=2,link=1gbit {flags}", "as-if").fine(110)
    held, evaluated = by_hand(2, exchange)
    for replica in range(2):
        assert values(run.told("held", replica)) == pytest.approx(values(held), rel=1e-9), replica
        assert run.told("evaluated", replica) == pytest.approx(evaluated, rel=1e-9)


def test_a_run_that_stops_between_two_exchanges_has_the_mean(start: Start) -> None:
    run = start(SCRIPT, f"--exchange collective --replicas 2 --every {EVERY} --most-steps 6").fine(110)
    held, _ = by_hand(2, mean_of_all, made=6)
    for replica in range(2):
        assert values(run.told("held", replica)) == pytest.approx(values(held), rel=1e-9), replica


def test_a_run_that_is_told_to_stop_between_two_exchanges_has_the_mean(start: Start) -> None:
    run = start(SCRIPT, "--exchange collective --replicas 2 --every 1000000 --longest 2s", "long").fine(110)
    assert len({str(run.told("held", replica)) for replica in range(2)}) == 1


# Without shared memory every replica is a host of its own to the others.
@pytest.mark.parametrize(
    ("flags", "hosts", "exchange"),
    [
        (f"--replicas 2 --every {EVERY} --outer-momentum 0.9 --outer-lr 0.7", 2, OuterSteps()),
        ("--replicas 4 --gossip", 4, mean_with_one),
    ],
    ids=["outer momentum", "gossip"],
)
def test_hosts_are_what_the_same_is_by_hand(
    start: Start, flags: str, hosts: int, exchange: Callable[[int, list[Held]], list[Held] | None]
) -> None:
    run = start(SCRIPT, f"--exchange collective {flags}").fine(110)
    held, evaluated = by_hand(hosts, exchange)
    assert len({str(run.told("held", replica)) for replica in range(hosts)}) == 1
    assert values(run.told("held", 0)) == pytest.approx(values(held), rel=1e-9)
    assert run.told("evaluated", 0) == pytest.approx(evaluated, rel=1e-9)
    assert run.told("ledger", 0) == "epoch 0: 80 samples, each once"


@pytest.mark.parametrize("hosts", range(2, 10))
def test_everybody_meets_everybody_and_nobody_two_at_once(hosts: int) -> None:
    turns = hosts - 1 + hosts % 2
    for turn in range(turns):
        met = [partner(host, hosts, turn) for host in range(hosts)]
        assert met.count(None) == hosts % 2
        assert all(other is None or (other != host and met[other] == host) for host, other in enumerate(met))
    for host in range(hosts):
        assert {partner(host, hosts, turn) for turn in range(turns)} >= set(range(hosts)) - {host}
