"""Hosts join a mirrored run: late, or again after their death, by the same command; some die while they do.

Each host is a network namespace, and each death is real. The runs wait for a line before each epoch, so that a host is
ready when a step ends, and whoever is to join does so for certain.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from checksum import largest_difference
from conftest import TESTS, Run, Start
from emulated import END_S, ROUNDING, needs_hosts, wait_until
from faults import Fault, as_argument, happened, kill, kill_host

SCRIPT = TESTS / "faulty_training.py"
EPOCHS, STEPS = 4, 20
LEDGER = "epochs 0 to 3: 60 samples, each once"


pytestmark = [needs_hosts, pytest.mark.timeout(400)]


class Joined:
    """A run that begins an epoch when it is told to, and hosts that are started later."""

    def __init__(self, start: Start, folder: Path, hosts: str, flags: str, faults: Sequence[Fault]) -> None:
        self._lines = folder / "lines"
        self._lines.touch()
        arguments = f"--epochs {EPOCHS} --epoch-a-line {self._lines} --faults {as_argument(faults)}"
        self.run = start(SCRIPT, f"--emulate hosts={hosts},link=1gbit --timeout 120 {flags}", arguments)
        self.later: list[subprocess.Popen[str]] = []

    def host(self, number: int, *changed: tuple[str, str]) -> subprocess.Popen[str]:
        """Starts a host by the command of host 0, but for its number and what is `changed` in it."""
        config = self.run.path / "config.json"
        wait_until(lambda: config.exists() and config.stat().st_size)
        words = json.loads(config.read_text())["command"][1:]
        for flag, value in (("--node-rank", str(number)), *changed):
            words[words.index(flag) + 1] = value
        (namespace,) = Path("/run/netns").glob(f"paceline-{self.run.process.pid}-*-h{number}")
        inside = ["ip", "netns", "exec", namespace.name, sys.executable, "-m", "paceline", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
        pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.later.append(subprocess.Popen(inside, cwd=self.run.folder, env=environment, **pipes))
        return self.later[-1]

    def await_events(self, event: str, count: int = 1) -> None:
        """Until host 0 has noted that so often."""
        path = self.run.path / "events.jsonl"
        wait_until(lambda: path.exists() and path.read_text().count(f'"event":"{event}"') >= count)

    def go_on(self, epochs: int = EPOCHS) -> None:
        with self._lines.open("a") as file:
            file.write("go\n" * epochs)

    def fine(self) -> Run:
        self.run.fine(END_S)
        for process in self.later:
            out, err = process.communicate(timeout=END_S)
            assert process.returncode in (0, -9), (out, err)
        return self.run


@pytest.fixture(scope="module")
def alone(start: Start) -> Run:
    return start(SCRIPT, None, f"--epochs {EPOCHS}").fine(END_S)


Joining = Callable[..., Joined]


@pytest.fixture
def joining(start: Start, tmp_path: Path) -> Iterator[Joining]:
    """`joining("2:3", "--replicas 3", faults)`"""
    made: list[Joined] = []

    def begin(hosts: str, flags: str, faults: Sequence[Fault] = ()) -> Joined:
        made.append(Joined(start, tmp_path, hosts, flags, faults))
        return made[-1]

    yield begin
    for process in (process for joined in made for process in joined.later):
        process.kill()
        process.communicate()


def said(run: Run, replica: int) -> dict[str, object]:
    """What the last process of that replica printed at its end, whichever folder its host has."""
    logs = sorted(run.path.rglob(f"replica-{replica}.log"), key=lambda path: path.stat().st_mtime)
    found: dict[str, object] = {}
    for line in logs[-1].read_text().splitlines():
        found |= json.loads(line) if line.startswith("{") else {}
    return found


def assert_as_if_all_had_been_there(run: Run, alone: Run, left: Sequence[int], faults: Sequence[Fault]) -> None:
    """`left`: the replicas that were there at the end; all of them know of all samples, and have the same bits."""
    assert happened(run.folder, faults) == list(faults)
    assert largest_difference(alone.folder / "last.safetensors", run.folder / "last.safetensors") < ROUNDING
    losses = alone.told("losses")
    for replica in left:
        own = said(run, replica)
        assert (own["ledger"], own["steps"], own["checksum"]) == (LEDGER, STEPS, said(run, left[0])["checksum"])
        assert own["evaluations"] == pytest.approx(alone.told("evaluations"), rel=ROUNDING)
        assert isinstance(own["losses"], dict)
        assert str(STEPS - 1) in own["losses"]
        for step, loss in own["losses"].items():
            assert loss == pytest.approx(losses[step], rel=ROUNDING)
    run.assert_nothing_left()


def test_a_host_comes_late_and_again_after_its_death_and_another_with_it(joining: Joining, alone: Run) -> None:
    """Host 0 makes an epoch alone; host 1 joins, and dies in the next; it comes again, and host 2 at the same time."""
    faults = [kill_host(of=1).at(step=8).in_("waiting")]
    joined = joining("1:3", "--replicas 3", faults)
    joined.await_events("step")  # one that comes sooner is there at the start
    joined.host(1)
    joined.await_events("host ready")
    joined.go_on(1)
    joined.await_events("host lost")
    joined.host(1)
    joined.host(2)
    joined.await_events("host ready", 3)
    joined.go_on()
    run = joined.fine()
    assert_as_if_all_had_been_there(run, alone, [0, 1, 2], faults)
    assert [entry["host"] for entry in run.events if entry["event"] == "host joined"] in ([1, 1, 2], [1, 2, 1])
    assert {"5", "9"}.isdisjoint(said(run, 2)["losses"])  # type: ignore[call-overload]
    assert "10" not in said(run, 2)["losses"]  # type: ignore[operator]
    assert "paceline: host 1 takes part" in run.err.splitlines()


# Who dies, and when: one that joins (of host 2, replicas 4 and 5) or one of those that let it in.
DEATHS = {
    "one that waits": (kill(replica=5).in_("joining"), [0, 1, 2, 3, 4]),
    "all that wait": (kill_host(of=4).in_("joining"), [0, 1, 2, 3]),
    "one that is about to get it": (kill(replica=4).in_("bringing"), [0, 1, 2, 3, 5]),
    "all that are about to get it": (kill_host(of=4).in_("bringing"), [0, 1, 2, 3]),
    "one that gives it": (kill(replica=0).at(step=5).in_("bringing"), [1, 2, 3, 4, 5]),
    "a host beside": (kill_host(of=2).at(step=5).in_("bringing"), [0, 1, 4, 5]),
    "one that has got it": (kill(replica=4).in_("brought"), [0, 1, 2, 3, 5]),
    "one that has given it": (kill(replica=0).at(step=5).in_("brought"), [1, 2, 3, 4, 5]),
    "one that has been let in": (kill(replica=5).in_("admitted"), [0, 1, 2, 3, 4]),
}


@pytest.mark.soak
@pytest.mark.parametrize("who", DEATHS)
def test_somebody_dies_while_a_host_joins(who: str, joining: Joining, alone: Run) -> None:
    fault, left = DEATHS[who]
    joined = joining("2:3", "--replicas 6 --lost-after 5s", [fault])
    joined.await_events("step")
    joined.host(2)
    if who == "all that wait":
        joined.await_events("host lost")
    else:
        joined.await_events("host ready")
    joined.go_on()
    run = joined.fine()
    assert_as_if_all_had_been_there(run, alone, left, [fault])


@pytest.mark.soak
@pytest.mark.parametrize("wire", ["int8", "topk:0.2", "powersgd:2"])
def test_all_have_the_same_bits_after_a_host_has_joined_over_a_lossy_wire(wire: str, joining: Joining) -> None:
    joined = joining("2:3", f"--replicas 3 --wire {wire}")
    joined.await_events("step")
    joined.host(2)
    joined.await_events("host ready")
    joined.go_on()
    run = joined.fine()
    assert len({said(run, replica)["checksum"] for replica in range(3)}) == 1
    assert {said(run, replica)["ledger"] for replica in range(3)} == {LEDGER}
    run.assert_nothing_left()


@pytest.mark.soak
def test_a_host_that_comes_too_late_is_told_so_and_one_less_than_asked_for_ends_the_run(joining: Joining) -> None:
    faults = [kill_host(of=1).at(step=7).in_("forward")]
    joined = joining("2:3", "--replicas 3", faults)
    joined.await_events("step")
    other = joined.host(2, ("--timeout", "90"))
    out, err = other.communicate(timeout=END_S)
    assert (other.returncode, out) == (2, "")
    assert err == "paceline: timeout is '90.0': that is host 2's, and host 0 has '120.0', give every host the same\n"
    joined.go_on()
    run = joined.run.end(END_S)
    assert run.code == 1
    assert "paceline: 1 host is left, and --nnodes asks for 2 at least; the run ends" in run.err.splitlines()
    run.assert_nothing_left()
