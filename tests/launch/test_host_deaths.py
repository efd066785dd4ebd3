"""Mirrored replicas of several hosts: a replica, or all of a host, dies at any moment, or falls silent, and the others
go on to the result of the run in which nothing happened. Each fault is real: SIGKILL, SIGSTOP, a link that is down.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from checksum import largest_difference
from conftest import TESTS, Run, Start
from emulated import CUT_OFF_FROM_HOST_0, END_S, ROUNDING, needs_hosts, wait_until
from faults import Fault, as_argument, cut_off, happened, kill, kill_host, stop_host

SCRIPT = TESTS / "faulty_training.py"
LEDGER = "epochs 0 to 2: 60 samples, each once"


pytestmark = [needs_hosts, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def alone(start: Start) -> Run:
    return start(SCRIPT, None).fine(END_S)


def train(start: Start, hosts: int, replicas: int, faults: Sequence[Fault], flags: str = "") -> Run:
    emulated = f"--replicas {replicas} --emulate hosts={hosts},link=1gbit --timeout 120 {flags}"
    return start(SCRIPT, emulated, f"--faults {as_argument(faults)}")


def assert_as_if_nothing_had_happened(run: Run, alone: Run, faults: Sequence[Fault], left: Sequence[int]) -> None:
    """`left`: the replicas that were there at the end."""
    assert happened(run.folder, faults) == list(faults)
    assert largest_difference(alone.folder / "last.safetensors", run.folder / "last.safetensors") < ROUNDING
    for replica in left:
        assert run.told("losses", replica) == pytest.approx(alone.told("losses"), rel=ROUNDING)
        assert run.told("evaluations", replica) == pytest.approx(alone.told("evaluations"), rel=ROUNDING)
        assert (run.told("ledger", replica), run.told("steps", replica)) == (LEDGER, 15)
        assert run.told("checksum", replica) == run.told("checksum", left[0])
    run.assert_nothing_left()


def test_replicas_and_a_host_are_killed_and_the_others_go_on(start: Start, alone: Run) -> None:
    """Host 2 has one replica less than the others for a while, then host 1 is gone, then host 0 loses its first."""
    faults = [
        kill(replica=5).at(step=1).in_("backward"),
        kill_host(of=2).at(step=4).in_("statistics"),
        kill(replica=0).at(step=7).in_("waiting"),
    ]
    run = train(start, 3, 6, faults).fine(END_S)
    assert_as_if_nothing_had_happened(run, alone, faults, [1, 4])
    killed = "replica 5 was killed by SIGKILL at step 1; 1 replica goes on on this host"
    gone = "host 1 is gone (the other side closed the connection); the replicas of the other hosts go on"
    said = [line.removeprefix("paceline: ") for line in run.err.splitlines()]
    assert killed in said
    assert gone in said


def test_a_host_whose_link_falls_silent_ends_and_the_first_goes_on(start: Start, alone: Run) -> None:
    """Both still run, and exactly one of them goes on."""
    faults = [cut_off(host_of=1).at(step=2).in_("backward")]
    run = train(start, 2, 2, faults, "--lost-after 3s").fine(END_S)
    assert_as_if_nothing_had_happened(run, alone, faults, [0])
    assert not run.all_told("losses", 1)
    said = "paceline: host 1 is gone (it has been silent for 3 s); the replicas of the other hosts go on"
    assert said in run.err.splitlines()
    assert re.search(f"^paceline: {CUT_OFF_FROM_HOST_0}$", run.err, re.MULTILINE), run.err


MOMENTS = (
    "start",
    "forward",
    "statistics of backward",
    "waiting",
    "completing",
    "deciding",
    "norm",
    "update",
    "evaluation",
    "saving",
)


@pytest.mark.soak
@pytest.mark.parametrize(
    "moment", ["start", "forward", "waiting", "completing", "deciding", "norm", "update", "evaluation"]
)
def test_a_host_is_killed_at_any_moment(moment: str, start: Start, alone: Run) -> None:
    faults = [kill_host(of=3).at(step=0 if moment == "start" else 5).in_(moment)]
    run = train(start, 3, 6, faults).fine(END_S)
    assert_as_if_nothing_had_happened(run, alone, faults, [0, 1, 4, 5])


@pytest.mark.soak
@pytest.mark.parametrize("moment", [*MOMENTS, "statistics of backward", "saving"])
def test_a_replica_of_two_hosts_is_killed_at_any_moment(moment: str, start: Start, alone: Run) -> None:
    """The first of host 0, which has the store and writes checkpoints."""
    faults = [kill(replica=0).at(step=0 if moment == "start" else 5).in_(moment)]
    run = train(start, 2, 4, faults).fine(END_S)
    assert_as_if_nothing_had_happened(run, alone, faults, [1, 2, 3])


@pytest.mark.soak
def test_a_host_that_is_stopped_is_given_up_and_ends_when_it_goes_on(start: Start, alone: Run) -> None:
    faults = [stop_host(of=2).at(step=3).in_("waiting")]
    run = train(start, 3, 3, faults, "--lost-after 3s")
    events = run.path / "events.jsonl"
    wait_until(lambda: events.exists() and '"host lost"' in events.read_text())
    wait_until(lambda: '"finished"' in events.read_text())
    (host,) = Path("/run/netns").glob(f"paceline-{run.process.pid}-*-h2")
    listed = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=True)
    for process in map(int, listed.stdout.split()):
        os.kill(process, signal.SIGCONT)
    run.fine(END_S)
    assert_as_if_nothing_had_happened(run, alone, faults, [0, 1])
    assert not run.all_told("losses", 2)


@pytest.mark.soak
def test_a_network_in_two_parts_leaves_that_of_host_0_training_though_it_is_smaller(start: Start, alone: Run) -> None:
    faults = [cut_off(host_of=0).at(step=4).in_("backward")]
    run = train(start, 3, 3, faults, "--lost-after 3s").fine(END_S)
    assert_as_if_nothing_had_happened(run, alone, faults, [0])
    assert not [told for replica in (1, 2) for told in run.all_told("losses", replica)]
    assert run.err.count("host 0 is gone (it has been silent for 3 s); the run ends") == 2


GATHERS = """
import json, os, signal
import paceline as pl
from paceline.run_place import find_place

rank, heard = find_place().rank, []
for call in range(6):
    if (call, rank) in ((2, 3), (4, 2)):
        os.kill(os.getpid(), signal.SIGKILL)
    heard.append(pl.gather(rank))
    pl.barrier()
print(json.dumps({"heard": heard}))
"""


@pytest.mark.soak
def test_calls_of_the_script_go_on_with_those_who_are_left(start: Start) -> None:
    """While host 1 has one replica left, of host 0 only the first has a link."""
    run = start(GATHERS, "--replicas 4 --emulate hosts=2,link=1gbit").fine(END_S)
    heard = [[0, 1, 2, 3]] * 2 + [[0, 1, 2]] * 2 + [[0, 1]] * 2
    assert [run.told("heard", replica) for replica in (0, 1)] == [heard, heard]
    run.assert_nothing_left()


@pytest.mark.soak
def test_the_next_host_saves_when_the_first_has_no_replica_left(start: Start, alone: Run) -> None:
    """Its supervisor is there, so the others go on; buffers and checkpoints are those of the first that takes part."""
    faults = [kill(replica=0).at(step=4).in_("forward")]
    run = train(start, 3, 3, faults).fine(END_S)
    assert_as_if_nothing_had_happened(run, alone, faults, [1, 2])


@pytest.mark.soak
@pytest.mark.parametrize("who", ["replica", "host"])
@pytest.mark.parametrize("wire", ["int8", "topk:0.2", "powersgd:2"])
def test_what_a_wire_owes_is_not_changed_by_a_try_that_is_given_up(wire: str, who: str, start: Start) -> None:
    """A death before anything was sent, and one after all of it was: the step is tried again, to the same bits."""
    checksums, losses = set(), []
    for moment in ("forward", "completing"):
        fault = (kill(replica=3) if who == "replica" else kill_host(of=2)).at(step=5).in_(moment)
        run = train(start, 2 if who == "replica" else 3, 4 if who == "replica" else 3, [fault], f"--wire {wire}")
        run.fine(END_S)
        assert happened(run.folder, [fault]) == [fault]
        checksums |= {run.told("checksum", replica) for replica in (0, 1)}
        losses.append(run.told("losses"))
        run.assert_nothing_left()
    assert losses[0] == losses[1]
    assert len(checksums) == 1


@pytest.mark.soak
def test_all_other_hosts_end_with_the_first(start: Start) -> None:
    run = train(start, 3, 3, [kill_host(of=0).at(step=3).in_("backward")]).end(END_S)
    gone = "paceline: host 0 is gone (the other side closed the connection); the run ends"
    assert (run.code, run.err.splitlines().count(gone)) == (137, 2)
    assert not [told for replica in range(3) for told in run.all_told("losses", replica)]
    run.assert_nothing_left()
