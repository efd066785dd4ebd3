"""Sync updates with spare replicas, between processes: who is late gives its samples back and holds nobody up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Run, Start
from rules_cases import AWKWARD, DIES, SLOW
from torch import nn

import paceline as pl
from paceline.errors import StrategyError

CASES = Path(__file__).with_name("rules_cases.py")
REPLICAS = 4


@pytest.fixture(scope="module")
def run(start: Start) -> Run:
    return start(CASES, f"--replicas {REPLICAS} --servers 1 --accept 3").fine()


def test_a_step_closes_without_the_slow_replica(run: Run) -> None:
    told = run.told("spare")
    assert told["steps"] >= 480 // 12
    assert told["accepting"] == 3
    assert len(run.told("spare", SLOW)["accepted"]) < 0.6 * told["steps"]
    for replica in set(range(REPLICAS)) - {SLOW}:
        assert len(run.told("spare", replica)["accepted"]) > 0.7 * told["steps"]


def test_who_is_late_is_counted_and_gives_its_samples_back(run: Run) -> None:
    told = run.told("spare")
    late = [run.told("spare", replica)["accepted"].count(False) for replica in range(REPLICAS)]
    assert sum(late) == told["late"] > 0
    assert late[SLOW] == max(late)
    assert told["ledger"] == "epoch 0: 480 samples, each once"
    assert set(told["staleness"]) == {"0"}


def test_auto_finds_out_how_many_to_wait_for(run: Run) -> None:
    needed = run.told("auto")["needed"]
    assert needed[0] == 4
    assert 3 in needed[:50]
    late = needed[50:]
    # On a busy machine others are slow at times too; the one that always is, is not waited for.
    assert sum(count < REPLICAS for count in late) > 0.7 * len(late)
    assert run.told("auto")["ledger"] == "epochs 0 to 1: 480 samples, each once"


@pytest.mark.parametrize("accept", ["1", "2", "3", "4", "auto"])
def test_no_size_of_data_is_a_deadlock_at_its_end(accept: str, run: Run) -> None:
    for replica in range(REPLICAS):
        assert run.told(f"accept {accept}", replica)["proofs"] == [
            f"epochs 0 to 1: {length} samples, each once" for length, _ in AWKWARD
        ]


def test_statistics_are_those_of_the_accepted_replicas(run: Run) -> None:
    slow = run.told("statistics", SLOW)["accepted"]
    assert slow
    assert not any(slow)
    for replica in range(REPLICAS):
        means = run.told("statistics", replica)["means"]
        assert max(map(abs, means)) < 2.0, f"replica {replica} has statistics of samples that were not used"


@pytest.mark.parametrize("field", ["rule", "accepting", "staleness"])
def test_what_only_servers_have_is_said(field: str) -> None:
    model = nn.Linear(1, 1)
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).mean())
    with pytest.raises(
        StrategyError, match=f"{field} is 'set': only servers have one; start with `paceline run SCRIPT"
    ):
        getattr(trainer, field)


def test_a_replica_that_dies_is_not_waited_for(run: Run) -> None:
    assert run.count("died") == 1
    for replica in set(range(REPLICAS)) - {DIES}:
        told = run.told("a death", replica)
        assert told["ledger"] == "epochs 0 to 1: 120 samples, each once"
        assert told["steps"] >= 2 * 120 // 12
