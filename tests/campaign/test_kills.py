"""Kills and pauses at random moments, from the first line of the script on, of anybody in every kind of run.

Part of `make soak`. To have the moments of a run again, as far as a machine repeats itself:
`PACELINE_SOAK_SEED=… make soak`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import pytest
from checksum import largest_difference
from conftest import Run, Start

SCRIPT = Path(__file__).parent / "campaign_training.py"
FAULTS, EPOCHS = 26, 10
LEDGER = f"epochs 0 to {EPOCHS - 1}: 48 samples, each once"
TRAINING_S = 600
LONGEST_PAUSE_S = 1.5


@dataclass(frozen=True)
class Attacked:
    """A way of running, the model for it, and how much rounding may make of another grouping of samples."""

    kind: str
    flags: str
    tolerance: float = 1e-9
    servers_die: Literal["any", "one at a time", "never"] = "any"  # and come back


CAMPAIGN = {
    "mirrored": Attacked("plain", "--replicas 3"),
    "batchnorm": Attacked("image", "--replicas 3"),
    "servers-log": Attacked("plain", "--replicas 2 --servers 2 --durability log"),
    "servers-log-tcp": Attacked("plain", "--replicas 2 --servers 2 --durability log --exchange tcp"),
    "servers-replica": Attacked("plain", "--replicas 2 --servers 2 --durability replica", servers_die="one at a time"),
    "spares": Attacked("plain", "--replicas 3 --accept 2 --servers 1 --durability log", tolerance=float("inf")),
    "async": Attacked("plain", "--replicas 2 --servers 2 --async --durability log", tolerance=float("inf")),
    "tables": Attacked("rows", "--replicas 2 --servers 2 --durability log", 1e-4),
    "tables-only": Attacked("rows", "--replicas 2 --servers 2 --only sparse", 1e-4, servers_die="never"),
    "tiles": Attacked("image", "--tiles 2 --replicas 2"),
    "wavefront": Attacked("recurrent", "--wavefront 2"),
    "stages": Attacked("plain", "--stages 2 --micro-batches 2 --replicas 2"),
    "layout": Attacked("plain", "--mesh data=2,model=2 --layout batch=data,hidden=model"),
    "cut-servers": Attacked("plain", "--mesh model=2 --layout hidden=model --replicas 2 --servers 2 --durability log"),
}


def attack(run: Run, chance: random.Random, meant: Attacked) -> bool:
    """Kill or pause one process of the run; return whether that has been done."""
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended while we looked
        supervisor = psutil.Process(run.process.pid)
        kinds = ("paceline.launch.replica", "paceline.central.server.process")
        children = [child for child in supervisor.children() if any(kind in child.cmdline() for kind in kinds)]
        if not children:
            return False
        if chance.random() < 0.4:
            return pause(chance.choice([supervisor, *children]), chance.uniform(0.0, LONGEST_PAUSE_S))
        victim = chance.choice(children)
        if kinds[1] in victim.cmdline() and not may_die(run, meant):
            return False
        victim.kill()
        return True
    return False


def may_die(run: Run, meant: Attacked) -> bool:
    return meant.servers_die == "any" or (meant.servers_die == "one at a time" and protected(run))


def pause(process: psutil.Process, seconds: float) -> bool:
    process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    process.send_signal(signal.SIGCONT)
    return True


def protected(run: Run) -> bool:
    """Whether every server that was killed has the other's copy again: two at once are not survived."""
    for server in range(2):
        log = run.path / f"server-{1 - server}.log"
        died = sum(event["event"] == "server ended" and event["server"] == server for event in run.events)
        if not log.exists() or log.read_text().count(f"is on server {server} again") < died:
            return False
    return run.count("step") > 0


@pytest.mark.soak
@pytest.mark.timeout(3 * TRAINING_S)
@pytest.mark.parametrize("name", CAMPAIGN)
def test_kills_and_pauses_change_nothing(start: Start, name: str) -> None:
    meant = CAMPAIGN[name]
    seed = int(os.environ.get("PACELINE_SOAK_SEED", random.randrange(1 << 32)))
    print(f"PACELINE_SOAK_SEED={seed}")
    chance = random.Random(seed)
    undisturbed = start(SCRIPT, None, f"{meant.kind} --epochs {EPOCHS} --pause 0").fine(TRAINING_S)

    flags = f"{meant.flags} --on-failure restart --max-restarts 1000"
    run = start(SCRIPT, flags, f"{meant.kind} --epochs {EPOCHS} --epoch-a-line faults")
    progress = run.folder / "faults"
    progress.touch()
    faults = 0
    while faults < FAULTS:
        time.sleep(chance.uniform(0.0, 1.5))
        assert run.process.poll() is None, run.end().err
        faults += attack(run, chance, meant)
        progress.write_text("\n" * (faults * (EPOCHS - 1) // FAULTS))
    progress.write_text("\n" * EPOCHS)
    run.fine(TRAINING_S)

    told = [
        value
        for replica in range(3)
        if (run.path / f"replica-{replica}.log").exists()
        for value in run.all_told("ledger", replica)
    ]
    assert told
    assert set(told) == {LEDGER}
    assert (
        largest_difference(undisturbed.folder / "last.safetensors", run.folder / "last.safetensors") < meant.tolerance
    )
    run.assert_nothing_left()
