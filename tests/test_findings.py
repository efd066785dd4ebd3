"""What a run found is data: told once, whoever is in charge, also if that one dies, and nothing without a run."""

from __future__ import annotations

import collections
import json
import math
import os
from pathlib import Path

import pytest
import torch
from conftest import Run, Start
from torch import nn

import paceline as pl
from paceline.errors import PacelineError
from paceline.findings import Finding, ServersAccount, TrainingBegan, WordOf
from paceline.watch.found import FoundSoFar
from paceline.watch.target import NOT_REACHED, Target

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.nn.functional as F
from torch import nn
import paceline as pl

checkpoint, epochs, dies, sleeps = (*sys.argv[1:], *["", "3", "0", "0"][len(sys.argv) - 1:])
torch.manual_seed(0)
x = torch.randn(120, 8)
y = (x @ torch.randn(8, 1)).squeeze(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

def loss(model, batch):
    time.sleep(float(sleeps))
    return F.mse_loss(model(batch[0]).squeeze(1), batch[1])

trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.05), loss)
if checkpoint:
    trainer.resume(checkpoint)
if float(sleeps):  # nobody has done everything before another one comes
    place = pl.place()
    Path(f"here-{place.rank}").touch()
    while not all(Path(f"here-{rank}").exists() for rank in range(place.world)):
        time.sleep(0.002)
for epoch in range(int(epochs)):
    for batch in trainer.batches((x, y), 24, seed=0):
        trainer.step(batch)
        if trainer.chief and trainer.steps == int(dies) and not pl.place().restarted:
            os.kill(os.getpid(), signal.SIGKILL)  # before it has told what the others tell as well
        trainer.log(inside=trainer.steps)
    trainer.log({"epoch/number": epoch})
    trainer.evaluate((x, y), loss, name="error")
    trainer.evaluate((x, y), lambda model, batch: {"one": 1.0, "error": loss(model, batch)}, name="both")
    if checkpoint:
        trainer.save(checkpoint)
"""
NAMES = ("epoch/number", "error", "both/one", "both/error")


def found(run: Run, name: str) -> list[tuple[int, float]]:
    """The steps and values at which this was told."""
    return [(entry["step"], entry["value"]) for entry in run.events if entry.get("name") == name]


ONE_ANOTHERS = ["", "--replicas 2", "--replicas 2 --servers 1", "--replicas 2 --servers 1 --in-graph", "--stages 2"]


@pytest.fixture(scope="module")
def alone(start: Start) -> Run:
    return start(SCRIPT).fine()


@pytest.mark.parametrize("flags", ONE_ANOTHERS[1:])
def test_every_strategy_tells_the_same_once(flags: str, alone: Run, start: Start) -> None:
    run = start(SCRIPT, flags).fine()
    for name in (*NAMES, "inside"):
        told, expected = found(run, name), found(alone, name)
        assert [step for step, _ in told] == [step for step, _ in expected], name
        assert [value for _, value in told] == pytest.approx([value for _, value in expected], rel=1e-4), name


def test_one_process_under_a_run_tells_with_time_and_samples(alone: Run) -> None:
    entries = [entry for entry in alone.events if entry.get("name") == "error"]
    assert [(entry["step"], entry["samples"]) for entry in entries] == [(5, 120), (10, 240), (15, 360)]
    assert all(0 < entry["seconds"] < 60 for entry in entries)
    ended = alone.events[-1]
    assert ended["found"]["error"]["value"] == entries[-1]["value"]
    assert ended["found"]["error"]["step"] == 15
    assert ended["bytes_sent"] == 0
    assert ended["staleness"] is None


def test_async_replicas_tell_what_they_do_together_once_and_the_servers_account(start: Start) -> None:
    run = start(SCRIPT, "--replicas 2 --servers 1 --async", "'' 3 0 0.03").fine()
    assert {name: len(found(run, name)) for name in NAMES} == dict.fromkeys(NAMES, 3)
    inside = found(run, "inside")
    assert len(inside) == len(set(inside)) <= 15
    ended = run.events[-1]
    assert 0 < ended["staleness"] <= 1
    assert (ended["late"], ended["dropped"]) == (0, 0)


def test_what_the_one_in_charge_did_not_live_to_tell_is_told_by_the_next(alone: Run, start: Start) -> None:
    run = start(SCRIPT, "--replicas 2 --on-failure restart", "'' 3 7").fine()
    assert run.count("died") == 1
    for name in (*NAMES, "inside"):
        told, expected = found(run, name), found(alone, name)
        assert [step for step, _ in told] == [step for step, _ in expected], name


def test_a_resumed_run_tells_nothing_that_was_told(alone: Run, start: Start) -> None:
    first = start(SCRIPT, "", "model.safetensors 2").fine()
    (first.folder / "run").rename(first.folder / "first")
    both = found(alone, "inside")
    again = start(SCRIPT, "--replicas 2", "model.safetensors 3", folder=first.folder).fine()
    assert found(again, "inside") == both[10:]
    for name in NAMES:
        assert [step for step, _ in found(again, name)] == [15], name


def test_a_run_stops_when_its_target_is_reached_and_says_when(start: Start) -> None:
    run = start(SCRIPT, '--until "inside>=4" --json', "'' 1000 0 0.01").fine()
    assert run.events[-1]["target"]["reached"]["step"] == 4
    assert run.events[-1]["stopped_by"] == "until"
    assert 4 <= run.events[-1]["steps"] < 200
    assert '"reached":{"value":4.0' in run.out


def test_a_target_that_is_not_reached_says_how_far_it_came(start: Start) -> None:
    run = start(SCRIPT, '--until "inside>=1e6" --most-steps 7 --replicas 2', "'' 1000").end()
    assert run.code == NOT_REACHED
    ended = run.events[-1]
    assert (ended["steps"], ended["target"]["best"], ended["stopped_by"]) == (7, 6.0, "most-steps")


def test_checkpoints_are_neither_written_nor_gone_on_from_and_steps_that_were_made_are_not_made_again(
    start: Start, tmp_path: Path
) -> None:
    saved = tmp_path / "saved.safetensors"
    start(SCRIPT, "--replicas 2", f"{saved} 1").fine()
    before = saved.read_bytes()
    again = start(SCRIPT, "--replicas 2 --most-steps 5", f"{saved} 3").fine()
    assert (again.events[-1]["steps"], again.events[-1]["stopped_by"]) == (0, "most-steps")
    trial = start(SCRIPT, "--replicas 2 --no-checkpoints", f"{saved} 1").fine()
    assert (trial.events[-1]["steps"], trial.events[-1]["resumed_at"], trial.events[-1]["kept"]) == (5, 0, [])
    assert saved.read_bytes() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="emulated hosts need root")
def test_hosts_stop_together_when_the_first_has_seen_the_target(start: Start) -> None:
    run = start(SCRIPT, '--replicas 2 --emulate hosts=2,link=1gbit --until "inside>=4"', "'' 1000").fine()
    ended = run.events[-1]
    assert (ended["target"]["reached"]["step"], ended["stopped_by"]) == (4, "until")
    assert [step for step, _ in found(run, "inside")] == list(range(1, len(found(run, "inside")) + 1))
    assert ended["bytes_sent"] > 1000
    other = [json.loads(line) for line in (run.path / "host-1" / "events.jsonl").read_text().splitlines()]
    assert not [entry for entry in other if entry["event"] == "found"]
    assert (other[-1]["exit_code"], other[-1]["stopped_by"]) == (0, "until")


@pytest.mark.soak
def test_servers_stop_after_the_longest_time(start: Start) -> None:
    run = start(SCRIPT, '--until "eror<=0" --longest 0.5s --replicas 2 --servers 1', "'' 100000").end()
    assert run.code == NOT_REACHED
    assert run.events[-1]["target"]["best"] is None
    assert run.events[-1]["stopped_by"] == "longest"


@pytest.mark.soak
def test_a_slow_replica_takes_as_many_times_as_long(start: Start) -> None:
    quick = start(SCRIPT, "--replicas 2", "'' 1 0 0.02").fine()
    slow = start(SCRIPT, "--replicas 2 --slow 1:6x", "'' 1 0 0.02").fine()
    took = [next(e["seconds"] for e in run.events if e.get("name") == "epoch/number") for run in (quick, slow)]
    assert took[1] > max(5 * 6 * 0.02, took[0])
    assert found(slow, "error") == found(quick, "error")


def test_a_loop_of_ones_own_has_no_slow_replica(start: Start) -> None:
    text = "import torch, paceline as pl\nmodel = torch.nn.Linear(1, 1)\n"
    run = start(text + "pl.distribute(model, torch.optim.SGD(model.parameters()))", "--slow 0:2x").end()
    assert run.code == 1
    assert "slow is '0:2x': a loop of one's own computes by itself; use pl.Trainer" in run.err


# ── without a run ────────────────────────────────────────────────────────────────────────────────────────────────


def test_in_plain_python_nothing_is_written_and_bad_input_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 1)
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters()), lambda model, batch: model(batch).mean())
    trainer.log(lr=torch.tensor(0.5), loss=float("nan"))
    assert isinstance(trainer.evaluate(torch.ones(4, 2), lambda model, batch: model(batch).mean(), name="mean"), float)
    assert not list(tmp_path.iterdir())
    for sentence, call in {
        "logged lr is 'str': give a number": lambda: trainer.log(lr="0.1"),
        "logged lr is 'a tensor of shape (2,)'": lambda: trainer.log(lr=torch.ones(2)),
        "name of what is logged is 3: give up to 100 letters": lambda: trainer.log({3: 1.0}),  # type: ignore[dict-item]
        "name of what is logged is '': give up to 100 letters": lambda: trainer.log({"": 1.0}),
        "what is logged is 'float': give numbers by name": lambda: trainer.log(0.5),  # type: ignore[arg-type]
        "name of the evaluation is 5: give up to": lambda: trainer.evaluate(torch.ones(4, 2), len, name=5),  # type: ignore[arg-type]
    }.items():
        with pytest.raises(PacelineError) as caught:
            call()
        assert str(caught.value).startswith(sentence)


# ── who is heard ─────────────────────────────────────────────────────────────────────────────────────────────────


def finding(key: str, value: float = 1.0, word_of: WordOf = "in charge") -> Finding:
    return Finding(key, word_of, 0.0, 2.0, 3, 4, {"name": value})


def test_how_long_cutting_took_is_what_the_slowest_device_says() -> None:
    so_far = FoundSoFar(lambda event, **fields: None)
    so_far.take(0, TrainingBegan(1.5), 0)
    assert so_far.cutting_s is None, "nothing is cut"
    for row, seconds in enumerate((0.5, 0.75, 0.25)):
        so_far.take(row, TrainingBegan(1.5, seconds), 0)
    assert so_far.cutting_s == 0.75


def test_each_key_is_told_once_by_whoever_is_in_charge() -> None:
    events: list[float] = []
    so_far = FoundSoFar(lambda event, **fields: events.append(fields["value"]), Target.parse("name>=5"))
    so_far.take(1, TrainingBegan(1.5), 0)
    so_far.take(1, finding("a", 10.0), 0)
    so_far.take(1, finding("b", 11.0), 0)
    so_far.take(1, finding("own", 12.0, "alone"), 0)
    assert not events, "another one is in charge"
    so_far.take(0, finding("a", 1.0), 0)
    so_far.hear(1)
    so_far.take(1, finding("b", 11.0), 1)
    so_far.take(1, finding("own", 12.0, "alone"), 1)
    assert events == [1.0, 11.0, 12.0]
    so_far.take(0, finding("evaluation", 13.0, "any"), 1)
    so_far.take(1, finding("evaluation", 13.0, "any"), 1)
    assert events[3:] == [13.0], "the first is as good as any"
    so_far.take(1, finding("c", math.nan), None)
    assert len(events) == 4, "this is another host's"
    assert so_far.target_seen is not None
    assert so_far.target_seen.reached is not None
    assert (so_far.target_seen.reached.value, so_far.target_seen.reached.seconds) == (11.0, 0.5)


def test_the_account_of_servers() -> None:
    account = ServersAccount(collections.Counter({0: 2, 3: 2}), late=1, dropped=3)
    assert (account.mean_staleness, account.thrown_away) == (1.5, 0.5)
