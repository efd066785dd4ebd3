"""`kill -9` of any replica at any moment costs nothing: the result is that of the run in which nobody was killed.

Every fault is a real SIGKILL of a real process. Several are put into one run, since starting torch takes longer than
all the training here.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import TESTS, Run, Start
from faults import Fault, as_argument, happened, kill
from safetensors.torch import load_file

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


def assert_same_parameters(one: Path, other: Path) -> None:
    expected, found = load_file(one), load_file(other)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        error = (found[name].double() - value.double()).abs().max().item()
        assert error <= ROUNDING * max(1.0, value.abs().max().item()), f"{name} is off by {error}"


def assert_as_if_nothing_had_happened(run: Run, unkilled: Run, faults: Sequence[Fault], left: Sequence[int]) -> None:
    """`left`: the replicas that were there at the end."""
    assert happened(run.folder, faults) == list(faults)
    assert_same_parameters(unkilled.folder / "last.safetensors", run.folder / "last.safetensors")
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
        kill(replica=3).at(step=7).in_("between"),
    ],
    "in BatchNorm's sums": [
        kill(replica=0).at(step=1).in_("statistics"),
        kill(replica=2).at(step=6).in_("statistics of backward"),
        kill(replica=1).at(step=6).in_("statistics of backward"),
    ],
    "around the decision": [
        kill(replica=3).at(step=1).in_("waiting"),
        kill(replica=0).at(step=4).in_("deciding"),
        kill(replica=1).at(step=8).in_("norm"),
    ],
    "in the middle of an update": [
        kill(replica=2).at(step=2).in_("update"),
        kill(replica=0).at(step=4).in_("update"),
        kill(replica=1).at(step=8).in_("closing"),
    ],
    "one after another at the same update": [
        kill(replica=2).at(step=3).in_("update"),
        kill(replica=0).at(step=3).in_("adoption"),
        kill(replica=1).at(step=3).in_("adoption"),
    ],
    "while they evaluate and save": [
        kill(replica=1).at(step=5).in_("evaluation"),
        kill(replica=0).at(step=5).in_("saving"),
        kill(replica=2).at(step=10).in_("saving"),
    ],
    "before they have begun": [
        kill(replica=1).in_("start"),
        kill(replica=0).in_("building"),
        kill(replica=3).in_("building"),
    ],
}


@pytest.mark.parametrize("faults", SURVIVED.values(), ids=SURVIVED)
def test_three_of_four_are_killed_and_the_last_one_goes_on(faults: list[Fault], start: Start, unkilled: Run) -> None:
    run = train(start, "--replicas 4 --on-failure continue", faults).fine()
    (last,) = set(range(4)) - {fault.replica for fault in faults}
    assert_as_if_nothing_had_happened(run, unkilled, faults, [last])
    assert set(run.told("losses", last)) == set(unkilled.told("losses"))
    assert (run.count("died"), run.count("restarted")) == (3, 0)


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
        kill(replica=0).at(step=11).in_("backward"),
    ],
}


@pytest.mark.parametrize("faults", RESTARTED.values(), ids=RESTARTED)
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
