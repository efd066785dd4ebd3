"""The servers of a run on this host: processes that only own, started and watched by the supervisor.

Each listens on a socket that the supervisor has opened before, and keeps open: replicas know the addresses from the
start, and while a server is being started again, whoever calls it simply waits in the queue of that socket.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import msgspec

from paceline.launch.guard import Guard
from paceline.launch.replica import RunProcess, starting
from paceline.net.secure import write_token
from paceline.run_place import ServersPlace

SERVER_VARIABLE = "PACELINE_SERVER"


class ServerSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What a server process is told."""

    number: int
    descriptor: int  # of its listening socket
    token_folder: str
    folder: str | None = None  # where it keeps its log


class ServerProcess(RunProcess):
    """A running server."""

    def __init__(self, setting: ServerSetting, log: Path, guard: Guard) -> None:
        self.number = setting.number
        environment = {
            SERVER_VARIABLE: msgspec.json.encode(setting).decode(),
            "OMP_NUM_THREADS": "1",  # it has threads of its own, for whole chunks
            # Threads of a server that has nothing to do must not keep the replicas from computing.
            "OMP_WAIT_POLICY": "passive",
        }
        with starting(f"server {self.number}"), log.open("ab") as output:
            super().__init__(
                ["paceline.central.server.process"],
                environment,
                guard,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(setting.descriptor,),
            )


class LocalServers:
    """All servers of a run on this host."""

    def __init__(self, count: int, folder: Path, guard: Guard, *, keep: bool) -> None:
        """`keep`: each keeps a log in `folder`, to go on from after its death."""
        self.count = count
        self._folder = folder.resolve()  # scripts may go elsewhere before they look for it
        self._guard = guard
        self._keep = keep
        self._listeners = [socket.create_server(("127.0.0.1", 0), backlog=1024) for _ in range(count)]
        write_token(folder)
        self.living: dict[int, ServerProcess] = {}

    def place(self, container: str) -> ServersPlace:
        addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in self._listeners]
        return ServersPlace(addresses=addresses, container=container, token_folder=str(self._folder))

    def start(self, number: int) -> ServerProcess:
        setting = ServerSetting(
            number=number,
            descriptor=self._listeners[number].fileno(),
            token_folder=str(self._folder),
            folder=str(self._folder / f"server-{number}") if self._keep else None,
        )
        log = self._folder / f"server-{number}.log"
        self.living[number] = ServerProcess(setting, log, self._guard)
        return self.living[number]

    def last_words(self, number: int) -> str:
        with contextlib.suppress(OSError):
            return (self._folder / f"server-{number}.log").read_text(errors="replace")[-4096:]
        return ""

    def close(self, *, forget: bool) -> None:
        """End all. `forget`: what they have written to go on from is not needed any more."""
        for server in list(self.living.values()):
            server.send(signal.SIGKILL)
            server.reap()
        self.living.clear()
        for number in range(self.count) if forget else ():
            shutil.rmtree(self._folder / f"server-{number}", ignore_errors=True)
        for listener in self._listeners:
            listener.close()
