"""Fifty kills at random moments over one training run. `make soak` runs this; it takes a few minutes.

To have the moments of a run again, as far as a machine repeats itself: `PACELINE_SOAK_SEED=… make soak`.
"""

from __future__ import annotations

import contextlib
import os
import random
import time

import psutil
import pytest
from checksum import largest_difference
from conftest import TESTS, Run, Start

KILLS = 50
TRAINING = f"--epochs {KILLS} --samples 1200"  # a hundred updates an epoch, and one epoch a kill
LEDGER = f"epochs 0 to {KILLS - 1}: 1200 samples, each once"
TRAINING_S = 1200


def kill_one(run: Run, chance: random.Random) -> None:
    """Any replica: one that trains, waits, evaluates, saves, or has just been started again."""
    with contextlib.suppress(psutil.NoSuchProcess):  # ended while we looked
        supervisor = psutil.Process(run.process.pid)
        replicas = [child for child in supervisor.children() if "paceline.launch.replica" in child.cmdline()]
        if replicas:
            chance.choice(replicas).kill()


@pytest.mark.soak
@pytest.mark.timeout(2 * TRAINING_S)
def test_fifty_kills_at_random_moments_change_nothing(start: Start) -> None:
    seed = int(os.environ.get("PACELINE_SOAK_SEED", random.randrange(1 << 32)))
    print(f"PACELINE_SOAK_SEED={seed}")
    chance = random.Random(seed)
    unkilled = start(TESTS / "faulty_training.py", "--replicas 4", TRAINING).fine(TRAINING_S)

    flags = "--replicas 4 --on-failure restart --max-restarts 1000"
    run = start(TESTS / "faulty_training.py", flags, f"{TRAINING} --epoch-a-line kills")
    kills = run.folder / "kills"
    kills.touch()
    while not (run.path / "events.jsonl").exists():
        time.sleep(0.01)
    while (deaths := run.count("died")) < KILLS:
        kills.write_text("\n" * deaths)
        time.sleep(chance.uniform(0, 4))
        if run.process.poll() is not None:  # the last kill may be the one that lets the training end
            break
        kill_one(run, chance)
    kills.write_text("\n" * KILLS)
    run.fine(TRAINING_S)

    assert run.count("died") >= KILLS
    assert largest_difference(unkilled.folder / "last.safetensors", run.folder / "last.safetensors") < 1e-4
    told = [replica for replica in range(4) if run.all_told("ledger", replica)]
    assert told
    for replica in told:
        assert run.told("ledger", replica) == LEDGER
        assert run.told("checksum", replica) == run.told("checksum", told[0])
        assert run.told("evaluations", replica) == pytest.approx(unkilled.told("evaluations"), rel=1e-4)
    run.assert_nothing_left()
