"""Deadlines: late is told by name, nothing is half done, and the next call works."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import Start
from torch import nn

import paceline as pl
from paceline.cli import main
from paceline.errors import InvalidInput, StrategyError


class Gated(nn.Module):
    """A model that stops at a gate, in the middle, as long as that is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.gate = threading.Event()
        self.gate.set()
        self.passed = 0  # computations that have come to their end

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        self.gate.wait(60)
        x = self.last(x)
        self.passed += 1
        return x


@pytest.fixture
def model() -> Iterator[Gated]:
    torch.manual_seed(0)
    made = Gated()
    yield made
    made.gate.set()


X = torch.ones(3, 4)


def test_a_late_predictor_is_named_stopped_and_answers_the_next_call(model: Gated) -> None:
    predictor = pl.load(None, model)
    expected, passed = predictor(X), model.passed
    model.gate.clear()
    with pl.deadline(0.2), pytest.raises(pl.DeadlineExceeded) as late:
        predictor(X)
    assert (late.value.who, late.value.limit_s) == ("the model", pytest.approx(0.2, abs=0.01))
    assert late.value.late_s >= 0
    with pl.deadline(0.1), pytest.raises(pl.DeadlineExceeded, match="the call before this one was not done"):
        predictor(X)
    model.gate.set()
    assert torch.equal(predictor(X), expected)
    assert model.passed == passed + 1  # the late one was stopped before its last layer
    assert model.training  # as it was


def test_a_deadline_that_is_kept_changes_nothing(model: Gated) -> None:
    predictor = pl.load(None, model)
    with pl.deadline(60):
        assert torch.equal(predictor(X), predictor(X))
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            predictor(torch.ones(3, 5))
    with torch.autocast("cpu", torch.bfloat16), pl.deadline(60):
        assert predictor(X).dtype == torch.bfloat16


def test_another_threads_request_counts(model: Gated) -> None:
    predictor = pl.load(None, model)
    model.gate.clear()
    thread = threading.Thread(target=predictor, args=(X,))
    thread.start()
    while predictor._lock.acquire(blocking=False):  # until it is asked
        predictor._lock.release()
        time.sleep(0.001)
    with pl.deadline(0.1), pytest.raises(pl.DeadlineExceeded, match="the request of another thread"):
        predictor(X)
    model.gate.set()
    thread.join()


def trained(model: Gated) -> pl.Trainer:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    return pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)


def test_a_trainer_predicts_and_evaluates_within_a_deadline(model: Gated) -> None:
    trainer, data = trained(model), torch.randn(12, 4)

    def mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).mean()

    expected, answer = trainer.evaluate(data, mean, batch_size=5), trainer.predict(X)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.gate.clear()
    with pl.deadline(0.1):
        with pytest.raises(pl.DeadlineExceeded, match=r"the evaluation was not done within 0.1 s"):
            trainer.evaluate(data, mean, batch_size=5, name="mean")
        model.gate.set()
    with pl.deadline(60):
        assert trainer.evaluate(data, mean, batch_size=5) == expected
        assert torch.equal(trainer.predict(X), answer)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert model.training
    for batch in trainer.batches(data, 6):
        trainer.step(batch)
    assert trainer.steps == 2


def trained_in_time(limit_s: float | None, late_at: int | None = None) -> tuple[Any, list[float], list[Any]]:
    """What comes of a training whose forward is late once, in the middle of a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    data = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    calls, losses, given_up = 0, [], []

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out = model(x)
        if calls == late_at:
            assert limit_s is not None
            time.sleep(limit_s * 1.1)
        return out.pow(2).mean()

    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss)
    for batch in trainer.batches(data, 4, epochs=2):
        try:
            with pl.deadline(limit_s) if limit_s is not None else contextlib.nullcontext():
                losses.append(trainer.step(batch))
        except pl.DeadlineExceeded as late:
            given_up.append((late.who, late.limit_s))
    assert trainer.ledger is not None
    trainer.ledger.check()
    assert trainer.steps == 6
    return model.state_dict(), losses, given_up


def test_a_step_that_was_given_up_leaves_nothing_and_is_drawn_again() -> None:
    expected, losses, _ = trained_in_time(None)
    found, also, given_up = trained_in_time(3.0, late_at=3)
    assert given_up
    assert set(given_up) == {("the step", 3.0)}
    assert also == losses
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


MIRRORED = """
import json, os, time, torch, paceline as pl
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
calls, given_up = 0, []
def loss(model, x):
    global calls
    calls += 1
    out = model(x)
    if calls == 2 and os.environ["RANK"] == "1":
        time.sleep(LIMIT * 1.6)  # also if it has come to the step seconds before the other, or after
    return out.pow(2).mean()
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
for batch in trainer.batches(data, 4, epochs=2):
    try:
        trainer.step(batch)
    except pl.DeadlineExceeded as late:
        given_up.append(late.who)
trainer.ledger.check()
sums = [value.double().sum().item() for value in model.state_dict().values()]
print(json.dumps({"given_up": given_up, "steps": trainer.steps, "sums": sums}))
"""


@pytest.mark.timeout(180)
def test_replicas_give_a_step_up_all_together_and_name_the_late_one(start: Start) -> None:
    limited = start(MIRRORED.replace("LIMIT", "7.0"), "--replicas 2 --operation-timeout 7").fine(150)
    plain = start(MIRRORED.replace("LIMIT", "0.0"), "--replicas 2").fine()
    given_up = limited.told("given_up", 0)
    assert "replica 1" in given_up
    assert limited.told("given_up", 1) == given_up
    for replica in range(2):
        assert limited.told("steps", replica) == plain.told("steps", replica) == 8
        assert limited.told("sums", replica) == plain.told("sums", replica)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--replicas 2 --servers 1 --in-graph", "calls of replicas that are threads"),
        ("--stages 2", "calls of a model that is cut"),
        ("--replicas 2 --on-failure restart", "calls that a replica may join"),
        ("--replicas 2 --exchange collective", "calls of replicas that use collectives"),
    ],
)
def test_a_limit_of_calls_that_cannot_be_given_up_is_refused(
    flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", __file__, "--operation-timeout", "2", *flags.split()]) == 2
    assert f"operation-timeout is 2.0: {words}" in capsys.readouterr().err


def test_what_is_no_limit() -> None:
    for wrong in (0, -1, float("inf"), float("nan"), "1", True, None):
        with (
            pytest.raises(InvalidInput, match=r"^deadline is .*: give a number of seconds above 0"),
            pl.deadline(wrong),
        ):  # type: ignore[arg-type]
            pass


class TwoLayers(nn.Module):
    """A model for two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_a_cut_model_recovers_from_a_late_device() -> None:
    """Device 1 is stopped by a signal: its process is the one that is late."""
    with pl.load(None, TwoLayers(), split=pl.Stages(stages=2)) as predictor:
        with pl.deadline(5), pytest.raises(StrategyError, match="the first request, which cuts the model"):
            predictor(X)
        expected = predictor(X)
        assert predictor._others is not None
        device = predictor._others._processes[0]
        os.kill(device, signal.SIGSTOP)
        with pl.deadline(0.3), pytest.raises(pl.DeadlineExceeded, match=r"device 1 was not done within 0.3 s"):
            predictor(X)
        os.kill(device, signal.SIGCONT)
        assert torch.equal(predictor(X), expected)
