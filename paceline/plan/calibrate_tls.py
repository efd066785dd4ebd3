"""What servers on other machines cost: a server in a process of its own, with keys, reached as those would be."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import LaunchError

_BEGIN_S = 30.0  # for a server to listen


@contextlib.contextmanager
def server_with_keys() -> Iterator[tuple[str, ...]]:
    """Inside, a server runs that is reached over TLS. Yields the flags by which `paceline run` does so."""
    with tempfile.TemporaryDirectory(prefix="paceline-calibrate-") as scratch:
        keys, address = Path(scratch) / "keys", f"127.0.0.1:{_free_port()}"
        made = subprocess.run(
            [sys.executable, "-m", "paceline", "keys", "make", str(keys), "--name", "calibration"],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            raise LaunchError(f"keys to calibrate TLS with could not be made: {made.stderr.strip()}")
        command = ["server", "--dir", str(Path(scratch) / "server"), "--listen", address, "--keys", str(keys)]
        server = subprocess.Popen(
            [sys.executable, "-m", "paceline", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            _await(address, server)
            yield ("--join", address, "--keys", str(keys))
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _await(address: str, server: subprocess.Popen[bytes]) -> None:
    host, _, port = address.rpartition(":")
    give_up = time.monotonic() + _BEGIN_S
    while time.monotonic() < give_up and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
            return
        time.sleep(0.05)
    raise LaunchError(f"the server to calibrate TLS with did not come up at {address}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
