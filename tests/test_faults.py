"""`kill -9` of any replica at any moment costs nothing: the result is that of the run in which nobody was killed.

Every fault is a real SIGKILL of a real process. Several are put into one run, since starting torch takes longer than
all the training here.
"""

from __future__ import annotations

import json
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faulty_loop
import pytest
import torch
from checksum import largest_difference
from conftest import TESTS, Run, Start
from faults import Fault, as_argument, happened, kill
from safetensors.torch import save_file

SCRIPT = TESTS / "faulty_training.py"
LEDGER = "epochs 0 to 2: 60 samples, each once"
KILLED = 128 + signal.SIGKILL

# Survivors add up the same numbers in other groups: float sums differ by rounding, and nothing else may.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def unkilled(start: Start) -> Run:
    """Four replicas, none of them killed."""
    return start(SCRIPT, "--replicas 4").fine()


def train(start: Start, flags: str, faults: Sequence[Fault], arguments: str = "") -> Run:
    return start(SCRIPT, f"--timeout 40 {flags}", f"--faults {as_argument(faults)} {arguments}")


def assert_as_if_nothing_had_happened(run: Run, unkilled: Run, faults: Sequence[Fault], left: Sequence[int]) -> None:
    """`left`: the replicas that were there at the end."""
    assert happened(run.folder, faults) == list(faults)
    assert largest_difference(unkilled.folder / "last.safetensors", run.folder / "last.safetensors") < ROUNDING
    for replica in left:
        losses = run.told("losses", replica)
        assert losses == pytest.approx({n: unkilled.told("losses")[n] for n in losses}, rel=ROUNDING)
        assert run.told("evaluations", replica) == pytest.approx(unkilled.told("evaluations"), rel=ROUNDING)
        assert run.told("ledger", replica) == LEDGER
        assert run.told("checksum", replica) == run.told("checksum", left[0])
    # Nothing of a save that was killed, and of each save just its own two files.
    assert len(list(run.folder.glob("*.training.safetensors"))) == 2
    assert not list(run.folder.glob(".*"))
    run.assert_nothing_left()


SURVIVED: dict[str, list[Fault]] = {
    "while they compute": [
        kill(replica=1).at(step=1).in_("forward"),
        kill(replica=0).at(step=3).in_("backward"),
        kill(replica=2).at(step=5).in_("evaluation"),
    ],
    "while they wait": [
        kill(replica=0).at(step=1).in_("statistics"),
        kill(replica=3).at(step=4).in_("waiting"),
        kill(replica=1).at(step=6).in_("statistics of backward"),
    ],
    "when the step is decided": [
        kill(replica=2).at(step=1).in_("norm"),
        kill(replica=0).at(step=4).in_("update"),
        kill(replica=1).at(step=8).in_("deciding"),
    ],
    "all at the same update": [
        kill(replica=2).at(step=3).in_("update"),
        kill(replica=0).at(step=3).in_("adoption"),
        kill(replica=1).at(step=3).in_("closing"),
    ],
    "before they have begun, and while they save": [
        kill(replica=3).in_("start"),
        kill(replica=0).in_("building"),
        kill(replica=1).at(step=5).in_("saving"),
    ],
}


COUNTED = "while they compute"  # these are killed in a test of their own too, with a loss that counts


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(faults, id=name, marks=[pytest.mark.soak] if name == COUNTED else [])
        for name, faults in SURVIVED.items()
    ],
)
def test_three_of_four_are_killed_and_the_last_one_goes_on(faults: list[Fault], start: Start, unkilled: Run) -> None:
    run = train(start, "--replicas 4 --on-failure continue", faults).fine()
    (last,) = set(range(4)) - {fault.replica for fault in faults}
    assert_as_if_nothing_had_happened(run, unkilled, faults, [last])
    assert set(run.told("losses", last)) == set(unkilled.told("losses"))
    assert (run.count("died"), run.count("restarted")) == (3, 0)


def test_a_step_that_is_tried_again_counts_again(start: Start) -> None:
    """Of a loss that is (sum, count): what the dead have counted is not in it twice."""
    faults = SURVIVED[COUNTED]
    alone = start(SCRIPT, None, "--counted").fine()
    run = train(start, "--replicas 4 --on-failure continue", faults, "--counted").fine()
    assert_as_if_nothing_had_happened(run, alone, faults, [3])


RESTARTED: dict[str, list[Fault]] = {
    "in mid-epoch": [
        kill(replica=1).at(step=2).in_("forward"),
        kill(replica=0).at(step=6).in_("update"),
        kill(replica=2).at(step=8).in_("waiting"),
    ],
    "and once more while it joins": [
        kill(replica=1).at(step=1).in_("statistics"),
        kill(replica=1).in_("joining"),
        kill(replica=1).in_("admitted"),
    ],
}


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(RESTARTED["in mid-epoch"], id="in mid-epoch"),
        pytest.param(RESTARTED["and once more while it joins"], id="once more while it joins", marks=pytest.mark.soak),
    ],
)
def test_the_killed_are_started_again_and_take_part_to_the_end(
    faults: list[Fault], start: Start, unkilled: Run
) -> None:
    """Evaluations of epochs that lie behind are not repeated: one that was started again knows their results."""
    run = train(start, "--replicas 3 --on-failure restart", faults, "--await-return").fine()
    assert_as_if_nothing_had_happened(run, unkilled, faults, range(3))
    assert run.count("died") == run.count("restarted") == len(faults)
    assert run.count("joined") >= len({fault.replica for fault in faults})


def test_when_all_are_killed_they_start_anew_and_resume_from_the_last_save(start: Start, unkilled: Run) -> None:
    faults = [kill(replica).at(step=7).in_("between") for replica in range(3)]
    run = train(start, "--replicas 3 --on-failure restart", faults).fine()
    assert "no replica is left, all start anew" in run.err
    assert_as_if_nothing_had_happened(run, unkilled, faults, range(3))
    assert min(map(int, run.told("losses"))) == 5


def test_when_all_are_killed_and_none_is_started_again_the_exit_code_says_so(start: Start) -> None:
    faults = [kill(replica=1).at(step=2).in_("forward"), kill(replica=0).at(step=3).in_("update")]
    run = train(start, "--replicas 2 --on-failure continue", faults).end()
    assert run.code == KILLED
    assert "replica 0 was killed by SIGKILL at step 3; no replica is left" in run.err
    run.assert_nothing_left()


def test_with_stop_one_death_ends_the_run(start: Start) -> None:
    run = train(start, "--replicas 3 --on-failure stop", [kill(replica=1).at(step=3).in_("backward")]).end()
    assert run.code == KILLED
    assert run.err == "paceline: replica 1 was killed by SIGKILL at step 3; the run ends\n"
    run.assert_nothing_left()


TWO_TRAINERS = """
import json, sys, time, torch, paceline as pl
from torch import nn
from faults import arm, await_return, from_argument
from paceline.exchange.board import Board
from paceline.exchange.words import Word
from paceline.run_place import find_place

class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.main, self.branch = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x):
        takes = x[:, :1] > 0
        return self.main(x) + self.branch(x) * takes if takes.any() else self.main(x)

place, steps_before, trainer = find_place(), 0, None
board = Board(place.board) if place.board is not None else None
faults = from_argument(sys.argv[1]) if len(sys.argv) > 1 else []
reached = arm(faults, place.rank, lambda: steps_before + trainer.steps)
x = torch.rand(160, 2, generator=torch.Generator().manual_seed(1))
for update in range(4, 40):
    x[4 * update + 2 : 4 * update + 4] *= -1  # from now on, only the first half of a batch takes the branch
for model in (Branching(), nn.Linear(2, 1)):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, x: (m(x) - 1).square().mean())
    for batch in trainer.batches(x, 4, shuffle=False):
        reached("between")
        trainer.step(batch)
        if board is not None and steps_before == 0:
            await_return(board)
        while board is not None and steps_before + trainer.steps == 70 and board.get(1, Word.INCARNATION) < 6:
            time.sleep(0.01)  # the third process in that row has yet to come and go
    steps_before = 40
    told = {name: value.tolist() for name, value in model.state_dict().items()}
    print(json.dumps({type(model).__name__: told, "ledger": trainer.ledger.check()}))
"""


@pytest.fixture(scope="module")
def two_trainers(start: Start) -> Run:
    """Replica 1 is killed in the work of the first trainer, and again in that of the second."""
    faults = [kill(replica=1).at(step=3), kill(replica=1).at(step=60)]
    run = start(TWO_TRAINERS, "--replicas 2 --on-failure restart", as_argument(faults)).fine()
    assert happened(run.folder, faults) == faults
    return run


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the same script tells in one process, by model."""
    (tmp_path / "train.py").write_text(TWO_TRAINERS)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    runpy.run_path(str(tmp_path / "train.py"))
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    return {model: told for line in lines for model, told in line.items()}


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        assert torch.allclose(torch.tensor(found[name]), torch.tensor(value), rtol=ROUNDING, atol=ROUNDING), name


def test_one_started_again_adds_nothing_to_parameters_it_no_longer_uses(
    two_trainers: Run, alone: dict[str, Any]
) -> None:
    """What the killed process had left in its gradient buffer must not be taken for the new one's."""
    assert two_trainers.count("joined") == 1
    for replica in range(2):
        assert_close(two_trainers.told("Branching", replica), alone["Branching"])


def test_one_that_comes_too_late_for_its_trainer_leaves_the_others_alone(
    two_trainers: Run, alone: dict[str, Any]
) -> None:
    assert "replica 1 cannot join any more: the script has gone on to another trainer" in two_trainers.log(1)
    assert_close(two_trainers.told("Linear"), alone["Linear"])
    assert two_trainers.all_told("ledger") == ["epoch 0: 160 samples, each once"] * 2
    two_trainers.assert_nothing_left()


def test_a_loop_under_distribute_goes_on_with_the_mean_of_those_who_are_left(start: Start) -> None:
    """Who dies while the mean is made has given its gradient, and counts in that step for the last time."""
    faults = [kill(replica=2).at(step=2).in_("reducing"), kill(replica=0).at(step=5).in_("waiting")]
    run = start(TESTS / "faulty_loop.py", "--replicas 4", as_argument(faults)).fine()
    assert happened(run.folder, faults) == faults

    model, optimizer = faulty_loop.new_model()
    for step in range(faulty_loop.STEPS):
        living = {0, 1, 2, 3} - {fault.replica for fault in faults if fault.step < step}
        optimizer.zero_grad()
        losses = [faulty_loop.loss_of(model, replica, step) for replica in sorted(living)]
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    save_file(model.state_dict(), run.folder / "expected.safetensors")
    assert largest_difference(run.folder / "expected.safetensors", run.folder / "model-1.safetensors") < ROUNDING
    assert run.told("checksum", replica=3) == run.told("checksum", replica=1)
    run.assert_nothing_left()
