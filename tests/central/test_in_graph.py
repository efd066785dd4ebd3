"""One process that is all replicas: the same rules and results as a process a replica, and one loop that drives it."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, Start
from in_graph_cases import CASES as IN_THIS_PROCESS
from in_graph_cases import LEFT
from safetensors.torch import load_file

from paceline.cli import main

CASES = Path(__file__).with_name("in_graph_cases.py")
REPLICAS = 3

SLOW = """
import time, torch
from torch import nn
import paceline as pl

def loss(model, x):
    time.sleep(0.01)
    return model(x).square().mean()

torch.manual_seed(0)
model = nn.Linear(4, 1)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), loss)
for batch in trainer.batches(torch.ones(100_000, 4), 10):
    trainer.step(batch)
    if trainer.steps == 5:
        print("trained")
"""


@pytest.fixture(scope="module", params=["--servers 1", ""], ids=["a server", "the process has the parameters"])
def run(start: Start, request: pytest.FixtureRequest) -> Run:
    """All cases; in the end the script leaves in the middle of a loop."""
    run = start(CASES, f"--replicas {REPLICAS} {request.param} --in-graph").end()
    assert run.code == LEFT, run.err
    return run


def test_there_is_one_process_with_a_thread_a_replica(run: Run) -> None:
    told = run.told("a loop")
    assert run.count("started") == 1
    assert (told["replicas"], told["replica"], told["chief"]) == (REPLICAS, 0, True)
    assert [replica for replica, _, _ in told["threads"]] == [0, 1, 2]
    assert told["threads_left"] == []


def test_the_cores_are_divided_among_the_replicas(run: Run) -> None:
    told = run.told("a loop")
    for _, forward, backward in told["threads"]:
        assert forward == backward == max(1, told["main_threads"] // REPLICAS)


def test_the_loop_goes_round_once_an_update(run: Run) -> None:
    told = run.told("a loop")
    assert told["sizes"] == [[4, 4, 4]] * 3 + [[1, 1]]  # the last two samples
    assert told["seen_steps"] == [1, 2, 3, 4]
    assert told["ledger"] == "epoch 0: 38 samples, each once"


@pytest.mark.parametrize("case", ["schedules", "changed batches", "going on", "freezing", "statistics in the loop"])
def test_the_numbers_are_those_of_one_process(
    case: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run.told(case) == pytest.approx(IN_THIS_PROCESS[case](), rel=1e-4)


def test_a_batch_that_was_drawn_and_not_used_is_used_later(run: Run) -> None:
    told = run.told("a break")
    assert told["steps"] == 2 + 3
    assert told["ledger"] == "epoch 0: 30 samples, each once"


def test_statistics_are_resumed(run: Run) -> None:
    saved, resumed = run.told("resumed statistics")
    assert min(saved) > 1.0
    assert resumed == saved


def test_a_slow_replica_goes_on_in_the_background(run: Run) -> None:
    told = run.told("a slow replica")
    assert told["rounds"] == told["steps"] >= 30
    assert told["times"][2] < told["steps"] / 2
    assert told["late"] > 0
    assert told["ledger"] == "epoch 0: 60 samples, each once"


def test_the_users_model_is_current_also_if_its_replica_is_late(run: Run) -> None:
    told = run.told("a slow first replica")
    assert len(set(told["values"])) == len(told["values"])
    assert told["mean"] == pytest.approx(told["by_hand"], rel=1e-5)


@pytest.mark.parametrize("rule", ["async", "bounded", "drop"])
def test_async_rules_are_those_of_other_replicas(rule: str, run: Run) -> None:
    told = run.told(rule)
    assert told["steps"] == 2 * 60 // 2
    assert sum(told["staleness"].values()) == told["steps"] + told["dropped"]
    assert max(map(int, told["staleness"])) > 0
    assert bool(told["dropped"]) is (rule == "drop")
    assert told["ledger"] == "epochs 0 to 1: 60 samples, each once"
    assert told["mean"] == pytest.approx(told["by_hand"], rel=1e-5)  # the model is current after the loop
    assert told["mean"] < 0.01


def test_the_rule_may_change_in_the_middle(run: Run) -> None:
    told = run.told("changing rules")
    assert told["ledger"] == "epochs 0 to 2: 60 samples, each once"
    assert max(map(int, told["staleness"])) > 0
    assert told["mean"] == pytest.approx(told["by_hand"], rel=1e-5)


def test_in_graph_and_between_graph_sync_and_async_come_to_the_same_accuracy(run: Run, start: Start) -> None:
    between = start(CASES, "--replicas 2 --servers 1", "digits").fine().told("digits")
    within = run.told("digits")
    accuracies = [told[rule] for told in (between, within) for rule in ("sync", "async")]
    assert min(accuracies) > 0.94
    assert max(accuracies) - min(accuracies) <= 0.01 + 1 / 297  # a point, of 297 digits
    for told in (between, within):
        assert told["sync ledger"] == told["async ledger"] == "epochs 0 to 14: 1500 samples, each once"


FAILURES: dict[str, tuple[str, str]] = {
    "a failing replica": ("no more of this on replica 1", "breaks"),
    "a loss that does not use its model": ("loss is 'computed': no parameter has a gradient", "work_on"),
    "a model that cannot be copied": ("model is 'Uncopied': it cannot be copied", "copied"),
    "too few batches": ("trainer.step was given the batches of 2 replicas instead of 3", "take"),
    "no batch": ("trainer.step was given a batch that trainer.batches did not yield", "step"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_what_goes_wrong_is_raised_in_the_users_thread(case: str, run: Run) -> None:
    sentence, *frames = run.told(case)
    assert sentence.startswith(FAILURES[case][0])
    assert frames[-1] == FAILURES[case][1]


def test_nothing_is_left_behind(run: Run) -> None:
    run.assert_nothing_left()


def test_a_request_to_stop_is_obeyed_and_saves(start: Start) -> None:
    run = start(SLOW, "--replicas 3 --servers 1 --in-graph --accept 2 --save-on-stop stopped.safetensors")
    wait_for_line(run, "trained")
    run.process.send_signal(signal.SIGINT)
    assert run.end().code == 130, run.err
    assert load_file(run.folder / "stopped.safetensors")["weight"].shape == (1, 4)


def wait_for_line(run: Run, line: str) -> None:
    log, give_up = run.path / "replica-0.log", time.monotonic() + 60
    while not (log.exists() and line in log.read_text()):
        assert time.monotonic() < give_up
        assert run.process.poll() is None
        time.sleep(0.02)


IN_PLAIN_PYTHON = """
import torch
from torch import nn
import paceline as pl

def trained(**given):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    x = torch.randn(60, 8, dtype=torch.float64)
    loss = lambda model, x: model(x).square().mean()
    trainer = pl.Trainer(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss, **given)
    for batch in trainer.batches(x, 12, epochs=4, seed=1):
        trainer.step(batch)
    trainer.ledger.check()
    answer = trainer.predict(x)
    trainer.close()
    return trainer.steps, answer

(one_steps, one), (steps, threads) = trained(), trained(strategy=pl.Centralized(replicas=3, servers=0, in_graph=True))
assert steps == one_steps == 20
print(float((one - threads).abs().max() / one.abs().max()))
stale = trained(strategy=pl.Centralized(replicas=3, servers=0, in_graph=True, rule=pl.Async()))
assert stale[0] == 20
"""


def test_a_plain_process_may_be_all_replicas_and_have_the_parameters(start: Start) -> None:
    run = start(IN_PLAIN_PYTHON, None).fine()
    assert float(run.out) < 1e-12


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "--in-graph --durability log",
            "durability is 'log': what the one process has ends with it, give --servers 1 or more, or leave it out",
        ),
        (
            "--in-graph --servers 1 --nnodes 2 --node-rank 0 --rdzv-endpoint localhost:29511",
            "in-graph is 'set': one process has all replicas, but there are 2 hosts, leave it out",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    flags: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('ran')")
    assert main(["run", "train.py", "--replicas", "4", *flags.split()]) == 2
    assert capsys.readouterr().err == f"paceline: {sentence}\n"
