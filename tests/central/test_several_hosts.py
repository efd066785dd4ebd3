"""Servers and replicas on several hosts: the results of one process, deaths on any host, and one sentence on every host
for what cannot go on. Emulated hosts have links and memory of their own; others are supervisors on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import MAIN, Run, Start

SCRIPT = Path(__file__).parent / "hosts_training.py"
EMULATED = "--emulate hosts=2,link=1gbit"
LEDGER = "epochs 0 to 2: 48 samples, each once"
END_S = 110.0  # processes are started again while others of this machine work
# A script that does not even load torch, and waits for what the test does.
WAITS = """
import json, os, time
from pathlib import Path
from paceline.run_place import find_place

place = find_place()
path = Path(f"supervisor-{place.rank}")
path.with_suffix(".unfinished").write_text(str(os.getppid()))
path.with_suffix(".unfinished").rename(path)
end = time.monotonic() + 100
while not Path("go").exists() and time.monotonic() < end:
    time.sleep(0.02)
print(json.dumps({"ended": place.rank, "servers": len(place.servers.addresses)}))
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root")


def wait_until(ready: Callable[[], object], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def assert_nothing_left(run: Run) -> None:
    """No replica and no server on any host, and no emulated host."""

    def belongs(process: psutil.Process) -> bool:
        try:
            given = process.environ()
            ours = given.get("PACELINE_PLACE", "") + given.get("PACELINE_SERVER", "")
            return str(run.path) in ours and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    wait_until(lambda: not [process for process in psutil.process_iter() if belongs(process)], 10)
    assert not list(Path("/run/netns").glob(f"paceline-{run.process.pid}-*"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def alone(start: Start) -> Run:
    """The same training in one process."""
    return start(SCRIPT, None)


def assert_equal(run: Run, alone: Run, replica: int) -> None:
    alone.fine() if alone.process.returncode is None else None
    assert run.told("evaluated", replica) == pytest.approx(alone.told("evaluated"), rel=1e-12)
    assert run.told("weights", replica) == pytest.approx(alone.told("weights"), rel=1e-12)
    assert run.told("ledger", replica) == LEDGER
    assert run.told("steps", replica) == 12


@needs_root
def test_a_killed_server_and_a_killed_replica_of_another_host_come_back_and_change_nothing(
    start: Start, alone: Run
) -> None:
    kills = json.dumps([["server 1", 2], ["replica 1", 4]])
    flags = f"{EMULATED} --servers 2 --replicas 2 --durability log --on-failure restart"
    run = start(SCRIPT, flags, f"--kill '{kills}'").fine(END_S)
    assert_equal(run, alone, 0)
    started_again = [line for line in run.err.splitlines() if "is started again" in line]
    assert [line.split(" was killed")[0] for line in started_again] == ["paceline: server 1", "paceline: replica 1"]
    assert not [path for host in (run.path, run.path / "host-1") for path in host.glob("server-?")]
    assert_nothing_left(run)


@pytest.mark.soak
def test_over_tls_the_others_go_on_without_a_replica_that_never_came(start: Start, tmp_path: Path) -> None:
    """Its host has no replica any more, and still has a server; there is nobody beside it who could tell."""
    subprocess.run([sys.executable, "-c", MAIN, "keys", "make", "keys", "--name", "x"], cwd=tmp_path, check=True)
    flags = f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{free_port()} --keys keys --replicas 2 --servers 2 --accept 2"
    flags += " --exchange tcp --wire bf16 --timeout 100"
    runs = [start(SCRIPT, f"{flags} --node-rank {host}", "--never 1", folder=tmp_path) for host in (1, 0)]
    for run in runs:
        run.fine(END_S)
    assert runs[0].told("ledger", 0) == LEDGER
    killed = "replica 1 was killed by SIGKILL before its first step"
    assert runs[0].err == f"paceline: {killed}; no replica is left on this host, those of others go on\n"
    assert_nothing_left(runs[0])


GONE = "host {} is gone (the other side closed the connection)"
LOST = {
    "replicas alone": ("--servers 1", 1, 0, f"{GONE.format(1)}; the replicas of the other hosts go on"),
    "the second server": ("--servers 2", 1, 1, f"{GONE.format(1)}, and server 1 with it; the run ends"),
    "host 0": ("--servers 1 --servers-on 1", 0, 137, f"{GONE.format(0)}; the run ends"),
    "replicas alone, which must not die": (
        "--servers 1 --on-failure stop",
        1,
        1,
        f"{GONE.format(1)}; the run ends",
    ),
}


@needs_root
@pytest.mark.parametrize("lost", LOST)
def test_who_goes_on_when_all_of_a_host_is_gone(lost: str, start: Start) -> None:
    flags, host, code, sentence = LOST[lost]
    run = start(WAITS, f"{EMULATED} --replicas 2 {flags}")
    supervisors = [run.folder / f"supervisor-{rank}" for rank in range(2)]
    wait_until(lambda: all(path.exists() for path in supervisors))
    os.kill(int(supervisors[host].read_text()), signal.SIGKILL)
    if code == 0:
        wait_until(lambda: '"host lost"' in (run.path / "events.jsonl").read_text())
        (run.folder / "go").touch()
    run.end(END_S)
    assert (run.code, run.err) == (code, f"paceline: {sentence}\n")
    assert [len(run.said(rank)) for rank in range(2)] == ([1, 0] if code == 0 else [0, 0])
    assert_nothing_left(run)


def write_secret(folder: Path) -> None:
    (folder / "secret").write_text("0123456789abcdef0123")
    (folder / "secret").chmod(0o600)


def come_as_a_stranger(port: int) -> None:
    """Say something else than a host would, as soon as host 0 listens, and read that nobody answers."""

    def said() -> bool:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
                stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(64))
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(100) == b""
                return True
        except ConnectionRefusedError:
            return False

    wait_until(said)


def test_a_run_is_over_when_all_hosts_have_finished_and_a_stop_is_for_all(start: Start, tmp_path: Path) -> None:
    """Nor does a stranger who comes first change anything."""
    write_secret(tmp_path)
    port = free_port()
    flags = f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{port} --token secret --replicas 2 --servers 1"
    runs = [start(WAITS, f"{flags} --node-rank 0", folder=tmp_path)]
    come_as_a_stranger(port)
    runs.append(start(WAITS, f"{flags} --node-rank 1", folder=tmp_path))
    wait_until(lambda: all((tmp_path / f"supervisor-{rank}").exists() for rank in range(2)))
    runs[1].process.send_signal(signal.SIGINT)
    (events,) = (tmp_path / "run").glob("events.jsonl")
    wait_until(lambda: '"stopped"' in events.read_text())  # on the other host
    (tmp_path / "go").touch()  # this script knows nothing of stops, and ends well
    for run in runs:
        assert (run.end(END_S).code, run.said(0)) == (130, [{"ended": 0, "servers": 1}])
    why = "what arrived is something else and not a frame of this protocol"
    assert runs[0].err == f"paceline: turned away whoever came from 127.0.0.1: {why}\n"
    assert_nothing_left(runs[0])


# It reaches the server by the keys that its host has made, and is let in.
SECURED = """
import socket
from pathlib import Path
from paceline.net.secure import Keys, wrap_client
from paceline.run_place import find_place

place = find_place()
keys = Path(place.servers.keys)
host, _, port = place.servers.addresses[0].rpartition(":")
with socket.create_connection((host, int(port)), timeout=60) as connection:
    version = wrap_client(connection, Keys.load(keys), 60).version()
import json
print(json.dumps({"spoken": version, "files": sorted(path.name for path in keys.iterdir())}))
"""


def test_hosts_that_share_a_secret_speak_tls_by_keys_that_none_has_sent(start: Start, tmp_path: Path) -> None:
    port = free_port()
    flags = f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{port} --replicas 2 --servers 1 --secure --token secret"
    runs = []
    for host in range(2):  # in folders of their own: nothing else is in common
        (folder := tmp_path / str(host)).mkdir()
        write_secret(folder)
        runs.append(start(SECURED, f"{flags} --node-rank {host}", folder=folder))
    files = ["ca.pem", "client.key", "client.pem", "server.key", "server.pem"]
    for host, run in enumerate(runs):
        assert run.fine(END_S).told("spoken", host) == "TLSv1.3"
        assert run.told("files", host) == files
        assert not list(run.folder.rglob("*.key"))


@pytest.mark.soak
def test_with_another_secret_keys_are_signed_by_another_authority(start: Start, tmp_path: Path) -> None:
    port = free_port()
    flags = f"--nnodes 2 --rdzv-endpoint 127.0.0.1:{port} --replicas 2 --servers 1 --secure --token secret --timeout 15"
    runs = []
    for host in range(2):
        (folder := tmp_path / str(host)).mkdir()
        (folder / "secret").write_text(f"0123456789abcdef{host}")
        (folder / "secret").chmod(0o600)
        runs.append(start(WAITS, f"{flags} --node-rank {host}", folder=folder))
    assert [run.end(END_S).code for run in runs] == [2, 2]
    assert "is signed by another CA" in runs[1].err


FLAGS = "--nnodes 2 --replicas 2 --servers 1 --token secret"
REFUSED = {
    "another wire": (
        [FLAGS, f"{FLAGS} --wire bf16"],
        "wire is 'bf16': that is host 1's, and host 0 has 'fp32', give every host the same",
    ),
    "another rule": (
        [f"{FLAGS} --async", FLAGS],
        "rule is 'sync': that is host 1's, and host 0 has 'async', give every host the same",
    ),
    "another number of hosts": (
        [FLAGS, FLAGS.replace("--nnodes 2 --replicas 2", "--nnodes 3 --replicas 3")],
        "nnodes is '3': that is host 1's, and host 0 has '2', give every host the same",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_hosts_that_disagree_are_told_so_on_every_one(case: str, start: Start, tmp_path: Path) -> None:
    flags, sentence = REFUSED[case]
    write_secret(tmp_path)
    port = free_port()
    ends = [f"--rdzv-endpoint 127.0.0.1:{port} --node-rank {host}" for host in range(2)]
    runs = [start(WAITS, f"{given} {end}", folder=tmp_path) for given, end in zip(flags, ends, strict=True)]
    for run in runs:
        assert (run.end(END_S).code, run.err) == (2, f"paceline: {sentence}\n")
    assert_nothing_left(runs[0])


def test_two_hosts_of_one_number_are_told_so_and_with_them_all_others(start: Start, tmp_path: Path) -> None:
    flags = f"{FLAGS} --rdzv-endpoint 127.0.0.1:{free_port()}".replace(
        "--nnodes 2 --replicas 2", "--nnodes 3 --replicas 3"
    )
    runs = []
    for number, host in enumerate((0, 1, 1)):
        (folder := tmp_path / str(number)).mkdir()
        write_secret(folder)
        runs.append(start(WAITS, f"{flags} --node-rank {host}", folder=folder))
    for run in runs:
        assert (run.end(END_S).code, run.err) == (2, "paceline: node-rank is 1: two hosts have it, give each its own\n")


def test_a_host_with_another_token_is_sent_away_and_one_that_does_not_come_is_named(
    start: Start, tmp_path: Path
) -> None:
    for number in range(2):
        (tmp_path / f"secret-{number}").write_text(f"0123456789abcdef{number}")
        (tmp_path / f"secret-{number}").chmod(0o600)
    port = free_port()
    flags = f"--nnodes 2 --replicas 2 --servers 1 --rdzv-endpoint 127.0.0.1:{port}"
    other = start(WAITS, f"{flags} --timeout 100 --token secret-1 --node-rank 1", folder=tmp_path)
    wait_until((tmp_path / "run" / "host-1" / "config.json").exists)  # from now on it tries to reach host 0
    hosts = [start(WAITS, f"{flags} --timeout 10 --token secret-0 --node-rank 0", folder=tmp_path), other]
    where = f"127.0.0.1:{port}"
    why = "the token is not host 0's: give every host the same with --token"
    assert hosts[1].end().code == 2
    assert hosts[1].err == f"paceline: host 0 at {where} does not let this host in: {why}\n"
    assert hosts[0].end().code == 2
    assert hosts[0].err == (
        f"paceline: turned away whoever came from 127.0.0.1: {why}\n"
        f"paceline: host 1 has not come to {where} within 10 s: start it with --node-rank 1, or give --timeout more\n"
    )


@needs_root
@pytest.mark.soak
def test_a_host_that_falls_silent_is_gone_for_the_others_and_the_others_for_it(start: Start) -> None:
    run = start(WAITS, f"{EMULATED} --replicas 2 --servers 1")
    wait_until(lambda: all((run.folder / f"supervisor-{rank}").exists() for rank in range(2)))
    (name,) = (path.name for path in Path("/run/netns").glob(f"paceline-{run.process.pid}-*-h1"))
    subprocess.run(["ip", "-n", name, "link", "set", "eth0", "down"], check=True)
    lost = '"host lost"'
    logs = [run.path / "events.jsonl", run.path / "host-1" / "events.jsonl"]
    wait_until(lambda: all(lost in log.read_text() for log in logs), 60)
    (run.folder / "go").touch()
    run.fine()
    assert [len(run.said(rank)) for rank in range(2)] == [1, 0]
    assert "host 0 is gone" in run.err
    assert "host 1 is gone" in run.err
    assert_nothing_left(run)
