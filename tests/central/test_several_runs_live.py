"""Runs that different people start in one container: processes of their own, a server that is killed, a run that is."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import MAIN, Start

SCRIPT = Path(__file__).with_name("sharing_training.py")


def soon(there: Callable[[], bool], timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not there():
        assert time.monotonic() < end
        time.sleep(0.02)


class ServerAt:
    """A `paceline server` at a port of its own, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.folder = folder
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", MAIN, "server", "--dir", str(self.folder), "--listen", self.address, "--json"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        assert self.process.stdout is not None
        self.process.stdout.readline()  # it listens

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerAt]:
    found = ServerAt(tmp_path / "server")
    yield found
    found.kill()


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_two_runs_share_a_container_and_neither_a_killed_server_nor_a_killed_run_disturbs_the_other(
    start: Start, server: ServerAt, tmp_path: Path
) -> None:
    flags = f"--join {server.address} --token {server.folder} --container shared --async --durability log"
    runs, names = {}, ("first", "killed")
    for name in names:  # by different people, in folders of their own, one after another
        folder = tmp_path / name
        folder.mkdir()
        runs[name] = start(SCRIPT, flags, name, folder=folder)
        soon((folder / f"{name}-waits").exists)
    listed = subprocess.run(
        [sys.executable, "-c", MAIN, "container", "show", "shared", "--at", server.address, "--token", server.folder],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "shared: step 6," in listed
    for number in range(2):
        assert f"run {number}     step 3, 12 samples, replicas 0, async" in listed
    server.kill()
    server.start()
    runs["killed"].process.send_signal(signal.SIGKILL)
    runs["killed"].process.communicate(timeout=30)
    (tmp_path / "first" / "first-goes-on").touch()
    assert "first: 20 steps, staleness up to" in runs["first"].fine().log(0)
