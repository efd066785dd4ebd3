"""Training over links that cut, delay, damage, repeat and reorder: the result is that of a good one. `make soak`.

And over one that is gone for longer than a first contact may take.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from bad_link import BadLink
from checksum import largest_difference
from conftest import Run, Start
from servers_here import running, write_token

from paceline.central.messages.connection import FIRST_CONTACT_S

SCRIPT = Path(__file__).parent / "campaign_training.py"
EPOCHS = 12
TRAINING = f"--epochs {EPOCHS} --pause 0.005"
TRAINING_S = 300

LINKS: dict[str, dict[str, float]] = {
    "cut": {"cut": 0.04},
    "delay": {"delay": 0.3},
    "damage": {"damage": 0.04},
    "repeat": {"repeat": 1.0, "cut": 0.04},
    "reorder": {"reorder": 0.5, "cut": 0.03},
    "all": {"cut": 0.01, "delay": 0.05, "damage": 0.02, "repeat": 0.5, "reorder": 0.2},
}


@pytest.fixture(scope="module")
def alone(start: Start) -> Run:
    return start(SCRIPT, None, f"plain {TRAINING}").fine()


@pytest.mark.soak
@pytest.mark.timeout(2 * TRAINING_S)
@pytest.mark.parametrize("rule", ["", "--accept 1", "--async"])
@pytest.mark.parametrize("link", LINKS)
def test_bad_links_change_nothing(start: Start, alone: Run, tmp_path: Path, link: str, rule: str) -> None:
    seed = int(os.environ.get("PACELINE_SOAK_SEED", random.randrange(1 << 32)))
    print(f"PACELINE_SOAK_SEED={seed}")
    with contextlib.ExitStack() as stack:
        links: list[BadLink] = []
        for number in range(2):
            server = stack.enter_context(running())
            made = BadLink(server.address, random.Random(seed + number), **LINKS[link])
            links.append(stack.enter_context(contextlib.closing(made)))
        at = ",".join(one.address for one in links)
        flags = f"--replicas 2 --join {at} --token {write_token(tmp_path)} --container c --exchange tcp {rule}"
        run = start(SCRIPT, flags, f"plain {TRAINING}").fine(TRAINING_S)
    counts: Any = links[0].counts + links[1].counts
    print(dict(counts))
    for what in LINKS[link]:
        assert sum(counts[word] for word in counts if word.startswith(what)) >= 1, counts
    for replica in range(2):
        assert run.told("ledger", replica) == f"epochs 0 to {EPOCHS - 1}: 48 samples, each once"
    if not rule:
        assert largest_difference(alone.folder / "last.safetensors", run.folder / "last.safetensors") < 1e-10
    else:
        assert run.told("evaluations")[-1] == pytest.approx(alone.told("evaluations")[-1], rel=0.1)
    run.assert_nothing_left()


RETURNING = """
import os, signal, time, torch, paceline as pl
from pathlib import Path

place, stepped = pl.place(), Path("stepped")
if place.restarted:
    Path("back").touch()
    while not Path("cut").exists():
        time.sleep(0.01)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).square().mean())
for batch in trainer.batches(torch.randn(32, 4), 8, epochs=100_000):
    trainer.step(batch)
    if place.restarted:
        stepped.touch()
    elif place.rank == 1 and trainer.steps >= 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if stepped.exists():
        break
    time.sleep(0.02)
"""


@pytest.mark.soak
def test_who_was_started_again_tries_for_longer_than_a_first_contact_takes(start: Start, tmp_path: Path) -> None:
    with running() as server:
        with contextlib.closing(BadLink(server.address, random.Random(0))) as link:
            address = link.address
            flags = f"--join {address} --token {write_token(tmp_path)} --container c --on-failure restart"
            run = start(RETURNING, f"--replicas 2 {flags} --timeout 60")
            end = time.monotonic() + 60
            while not (run.folder / "back").exists():
                assert time.monotonic() < end
                time.sleep(0.01)
        (run.folder / "cut").touch()
        time.sleep(FIRST_CONTACT_S + 3)
        with contextlib.closing(BadLink(server.address, random.Random(0), port=int(address.split(":")[1]))):
            run.fine()
    assert run.count("restarted") == 1
    assert (run.folder / "stepped").exists()
