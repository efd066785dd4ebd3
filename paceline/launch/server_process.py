"""One server process: what it is told at its start, and what it hears later, a line each on its standard input."""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path

import msgspec

from paceline.launch.guard import Guard
from paceline.launch.replica import RunProcess, starting
from paceline.launch.starter import ColdStart, NewProcess

SERVER_VARIABLE = "PACELINE_SERVER"


class ServerSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What a server process is told."""

    number: int
    descriptor: int  # of its listening socket
    token_folder: str
    keys: str | None = None  # folder with keys for TLS
    folder: str | None = None  # where it keeps its log


class KeepModels(msgspec.Struct, frozen=True, tag=True):
    """A server is told to write what it is the chief of into that folder, and to end."""

    folder: str


class ServerProcess(RunProcess):
    """A running server."""

    def __init__(self, setting: ServerSetting, log: Path, starter: ColdStart, guard: Guard) -> None:
        self.number = setting.number
        environment = {
            SERVER_VARIABLE: msgspec.json.encode(setting).decode(),
            "OMP_NUM_THREADS": "1",  # it has threads of its own, for whole chunks
            # Threads of a server that has nothing to do must not keep the replicas from computing.
            "OMP_WAIT_POLICY": "passive",
        }
        with starting(f"server {self.number}"), log.open("ab") as output, contextlib.ExitStack() as theirs:
            stdin, self._input = os.pipe()
            theirs.callback(os.close, stdin)
            streams = [stdin, output.fileno(), output.fileno()]
            super().__init__(
                NewProcess("paceline.central.server.process", [], environment, streams, [setting.descriptor]),
                starter,
                guard,
            )
        os.set_blocking(self._input, False)

    def has_ended(self, within_s: float) -> bool:
        """Wait for its end."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(1000 * within_s))

    def tell(self, message: msgspec.Struct) -> None:
        """Have it know something. Such messages are few and small: the pipe holds all of them."""
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._input, msgspec.json.encode(message) + b"\n")

    def reap(self) -> int:
        os.close(self._input)
        return super().reap()
