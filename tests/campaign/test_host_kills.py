"""Random deaths of replicas, servers and hosts, and links that fall silent, over two and three emulated hosts.

Part of `make soak`. Each run has the result of the run in which nothing happened, its ledger is exact, exactly one side
goes on, and nothing is left. The same moments again: `PACELINE_SOAK_SEED=… make soak`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
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
@pytest.mark.timeout(400)
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


LARGE = """
import json, torch, paceline as pl
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1000, 2000), torch.nn.ReLU(), torch.nn.Linear(2000, 1000))
data = torch.randn(64, 1000)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), lambda model, x: model(x).square().mean())
for batch in trainer.batches(data, 8, epochs=3):
    trainer.step(batch)
print(json.dumps({"ledger": str(trainer.ledger.check())}))
"""


@pytest.mark.soak
@pytest.mark.timeout(200)
@pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root")
@pytest.mark.parametrize("moment", range(4))
def test_a_host_that_is_killed_in_the_middle_of_a_message_is_not_waited_for(moment: int, start: Start) -> None:
    """Steps take more than a second, and nearly all of it messages of 16 MB are under way."""
    run = start(LARGE, "--replicas 2 --emulate hosts=2,link=100mbit --lost-after 4s --timeout 150")
    events = run.path / "events.jsonl"
    while not events.exists() or '"event":"step"' not in events.read_text():
        assert run.process.poll() is None, run.end().err
        time.sleep(0.05)
    time.sleep(0.3 * moment)
    killed = time.monotonic()
    for process in on_hosts(run, "", "1"):
        process.kill()
    run.fine(60)
    assert time.monotonic() - killed < 30
    assert "host 1 is gone" in run.err
    assert run.told("ledger") == "epochs 0 to 2: 64 samples, each once"
    run.assert_nothing_left()


# ── with servers ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Served:
    """How a run with servers is started, and which of its hosts, if any, has replicas alone and is killed at last."""

    hosts: int
    flags: str
    dies: int | None = None


SERVED = {
    "logs": Served(2, "--replicas 4 --servers 2 --durability log"),
    "a host of replicas": Served(3, "--replicas 3 --servers 2 --servers-on 0,1 --durability log", dies=2),
}
KILLS, EPOCHS = 8, 6
SERVER, REPLICA = "paceline.central.server.process", "paceline.launch.replica"


def on_hosts(run: Run, kind: str, host: str = "*") -> list[psutil.Process]:
    """The processes of that kind on all emulated hosts of a run, or on one."""
    found = []
    for name in Path("/run/netns").glob(f"paceline-{run.process.pid}-*-h{host}"):
        listed = subprocess.run(["ip", "netns", "pids", name.name], capture_output=True, text=True, check=False)
        for process in map(int, listed.stdout.split()):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [one for one in [psutil.Process(process)] if kind in " ".join(one.cmdline())]
    return found


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root")
@pytest.mark.parametrize("name", SERVED)
def test_replicas_and_servers_of_several_hosts_come_back(name: str, start: Start) -> None:
    meant, chance = SERVED[name], random.Random(f"{SEED}/{name}")
    script = Path(__file__).parent / "campaign_training.py"
    undisturbed = start(script, None, f"plain --epochs {EPOCHS} --pause 0").fine(300)
    flags = f"{meant.flags} --emulate hosts={meant.hosts},link=1gbit --on-failure restart --max-restarts 100"
    run = start(script, flags, f"plain --epochs {EPOCHS} --epoch-a-line lines")
    lines, killed = run.folder / "lines", {SERVER: 0, REPLICA: 0}
    lines.touch()
    events = run.path / "events.jsonl"
    while not events.exists() or '"event":"step"' not in events.read_text():
        assert run.process.poll() is None, run.end().err
        time.sleep(0.05)
    while sum(killed.values()) < KILLS:
        time.sleep(chance.uniform(0.0, 1.5))
        assert run.process.poll() is None, run.end().err
        kind = SERVER if sum(killed.values()) % 2 else REPLICA
        living = on_hosts(run, kind)
        if not living or (kind == SERVER and len(living) < 2):
            continue
        chance.choice(living).kill()
        killed[kind] += 1
        lines.write_text("\n" * (sum(killed.values()) * (EPOCHS - 2) // KILLS))
    if meant.dies is not None:
        for process in on_hosts(run, "", str(meant.dies)):
            process.kill()
    lines.write_text("\n" * EPOCHS)
    run.fine(300)
    logs = [path.read_text() for path in run.path.rglob("replica-?.log")]
    told = {json.loads(line)["ledger"] for log in logs for line in log.splitlines() if '"ledger"' in line}
    assert told == {f"epochs 0 to {EPOCHS - 1}: 48 samples, each once"}
    assert largest_difference(undisturbed.folder / "last.safetensors", run.folder / "last.safetensors") < 1e-9
    assert killed == {SERVER: KILLS // 2, REPLICA: KILLS // 2}
    run.assert_nothing_left()
