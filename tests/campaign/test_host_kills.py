"""Random deaths of replicas and hosts, and links that fall silent, over two and three emulated hosts.

Part of `make soak`. Each run has the result of the run in which nothing happened, its ledger is exact, exactly one side
goes on, and nothing is left. The same moments again: `PACELINE_SOAK_SEED=… make soak`.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest
from checksum import largest_difference
from conftest import TESTS, Run, Start
from faults import Fault, as_argument, cut_off, happened, kill, kill_host

SCRIPT = TESTS / "faulty_training.py"
LEDGER = "epochs 0 to 2: 60 samples, each once"
ROUNDING = 1e-5
RUNS = 16
SEED = int(os.environ.get("PACELINE_SOAK_SEED", "14"))
MOMENTS = ("between", "forward", "backward", "statistics", "waiting", "deciding", "norm", "update", "closing")


@dataclass(frozen=True)
class Campaign:
    """What happens in one run, and who is there at its end."""

    hosts: int
    rows: int  # replicas of each host
    faults: list[Fault]
    left: list[int]


def draw(number: int) -> Campaign:
    """Three faults at different steps, in ten of the runs the last of them a link that falls silent. Host 0 stays."""
    chance = random.Random(f"{SEED}/{number}")
    hosts, rows = (2, 2) if number % 2 else (3, 2)
    left = {host: list(range(host * rows, (host + 1) * rows)) for host in range(hosts)}
    faults: list[Fault] = []
    silent = number < 10
    for index, step in enumerate(sorted(chance.sample(range(1, 14), 3))):
        moment = chance.choice(MOMENTS)
        others = [host for host, living in left.items() if host and living]
        if index == 2 and silent:
            host = chance.choice(others)
            faults.append(cut_off(host_of=chance.choice(left.pop(host))).at(step).in_(moment))
        elif index == 1 and len(others) == 2:
            host = chance.choice(others)
            faults.append(kill_host(of=chance.choice(left.pop(host))).at(step).in_(moment))
        else:
            may_die = [
                one for host, living in left.items() if len(living) > 1 or (host and not silent) for one in living
            ]
            replica = chance.choice(may_die)
            left[replica // rows].remove(replica)
            faults.append(kill(replica).at(step).in_(moment))
    return Campaign(hosts, rows, faults, sorted(one for living in left.values() for one in living))


def test_the_campaign_has_as_many_deaths_and_silent_links_as_it_is_to_have() -> None:
    faults = [fault for number in range(RUNS) for fault in draw(number).faults]
    assert sum(fault.what == "link" for fault in faults) == 10
    assert sum(fault.what != "link" for fault in faults) >= 38
    assert sum(fault.what == "host" for fault in faults) == 8


@pytest.fixture(scope="module")
def alone(start: Start) -> Run:
    return start(SCRIPT, None).fine(170)


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root")
@pytest.mark.parametrize("number", range(RUNS))
def test_the_others_go_on_to_the_same_result(number: int, start: Start, alone: Run) -> None:
    drawn = draw(number)
    flags = f"--replicas {drawn.hosts * drawn.rows} --emulate hosts={drawn.hosts},link=1gbit --lost-after 4s"
    run = start(SCRIPT, flags, f"--faults {as_argument(drawn.faults)}").fine(170)
    assert happened(run.folder, drawn.faults) == drawn.faults
    assert largest_difference(alone.folder / "last.safetensors", run.folder / "last.safetensors") < ROUNDING
    for replica in range(drawn.hosts * drawn.rows):
        if replica in drawn.left:
            assert run.told("losses", replica) == pytest.approx(alone.told("losses"), rel=ROUNDING)
            assert run.told("evaluations", replica) == pytest.approx(alone.told("evaluations"), rel=ROUNDING)
            assert run.told("ledger", replica) == LEDGER
            assert run.told("checksum", replica) == run.told("checksum", drawn.left[0])
        else:
            assert not run.all_told("losses", replica)
    run.assert_nothing_left()
