"""Thirty kills of servers and replicas at random moments over one training. `make soak` runs this.

To have the moments of a run again, as far as a machine repeats itself: `PACELINE_SOAK_SEED=… make soak`.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path

import psutil
import pytest
from checksum import largest_difference
from conftest import Run, Start

SCRIPT = Path(__file__).parent / "durable_training.py"
KILLS = 30
EPOCHS = KILLS // 2
TRAINING = f"--epochs {EPOCHS} --samples 240 --pause 0.02"  # twenty updates an epoch
LEDGER = f"epochs 0 to {EPOCHS - 1}: 240 samples, each once"
TRAINING_S = 1200


def protected(run: Run) -> bool:
    """Whether every server that was killed has the other's copy again: two at once are not survived."""
    for server in range(2):
        log = run.path / f"server-{1 - server}.log"
        died = sum(event["event"] == "server ended" and event["server"] == server for event in run.events)
        if log.read_text().count(f"is on server {server} again") < died:
            return False
    return run.count("step") > 0


def kill_one(run: Run, chance: random.Random) -> None:
    """Any server, or any replica, whatever it is doing; servers as often as replicas."""
    with contextlib.suppress(psutil.NoSuchProcess):  # ended while we looked
        children = psutil.Process(run.process.pid).children()
        kind = chance.choice(["paceline.central.server.process", "paceline.launch.replica"])
        meant = [child for child in children if kind in child.cmdline()]
        if meant:
            chance.choice(meant).kill()


def deaths(run: Run) -> int:
    return run.count("died") + run.count("server ended")


@pytest.mark.soak
@pytest.mark.timeout(3 * TRAINING_S)
@pytest.mark.parametrize(
    ("rule", "durability"),
    [("", "log"), ("--async", "log"), ("", "replica"), ("--async", "replica")],
    ids=["sync-log", "async-log", "sync-replica", "async-replica"],
)
def test_thirty_kills_lose_no_update_and_count_no_sample_twice(start: Start, rule: str, durability: str) -> None:
    seed = int(os.environ.get("PACELINE_SOAK_SEED", random.randrange(1 << 32)))
    print(f"PACELINE_SOAK_SEED={seed}")
    chance = random.Random(seed)
    servers = f"--replicas 2 --servers 2 {rule}"
    unkilled = start(SCRIPT, servers, TRAINING).fine(TRAINING_S)

    flags = f"{servers} --durability {durability} --on-failure restart --max-restarts 1000"
    run = start(SCRIPT, flags, f"{TRAINING} --epoch-a-line kills")
    kills = run.folder / "kills"
    kills.touch()
    while not (run.path / "events.jsonl").exists():
        time.sleep(0.01)
    while (died := deaths(run)) < KILLS:
        kills.write_text("\n" * (died * (EPOCHS - 2) // KILLS))  # the training must not end before the last kill
        time.sleep(chance.uniform(0, 4))
        while durability == "replica" and not protected(run):
            assert run.process.poll() is None
            time.sleep(0.05)
        assert run.process.poll() is None
        kill_one(run, chance)
    kills.write_text("\n" * EPOCHS)
    run.fine(TRAINING_S)

    assert deaths(run) >= KILLS
    assert run.count("server ended") >= KILLS // 5
    told = [replica for replica in range(2) if run.all_told("ledger", replica)]
    assert told
    for replica in told:
        assert run.told("ledger", replica) == LEDGER
        final = run.told("steps", replica)
        assert final >= 20 * EPOCHS
        evaluations = run.told("evaluations", replica)
        if rule:
            assert evaluations[-1] == pytest.approx(unkilled.told("evaluations")[-1], rel=0.1)
        else:
            assert final == 20 * EPOCHS
            assert evaluations == pytest.approx(unkilled.told("evaluations"), rel=1e-4)
    if not rule:
        assert largest_difference(unkilled.folder / "last.safetensors", run.folder / "last.safetensors") < 1e-4
    for path in run.folder.glob("told-*"):  # what a replica was told has happened, and nothing went back
        steps = [int(line) for line in path.read_text().split()]
        assert steps == sorted(steps)
        assert not steps or steps[-1] <= final
    run.assert_nothing_left()
