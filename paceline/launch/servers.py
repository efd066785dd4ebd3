"""The servers of a run on this host: processes that only own, started and watched by the supervisor.

Each listens on a socket that the supervisor has opened before, and keeps open: replicas know the addresses from the
start, and while a server is being started again, whoever calls it simply waits in the queue of that socket.

A replica that ends before it has come to the servers is expected there. On one host the other replicas see on the board
that it has, and say so; of several hosts the supervisors tell each other, and the one that has the chief tells it, by a
line on its standard input.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.launch.guard import Guard
from paceline.launch.host_messages import ReplicaNews
from paceline.launch.replica import RunProcess, starting
from paceline.net.secure import TOKEN, new_token, write_secret
from paceline.run_place import ServersPlace

SERVER_VARIABLE = "PACELINE_SERVER"


class ServerSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What a server process is told."""

    number: int
    descriptor: int  # of its listening socket
    token_folder: str
    keys: str | None = None  # folder with keys for TLS
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
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                bufsize=0,
                pass_fds=(setting.descriptor,),
            )
        assert self._process.stdin is not None
        self._input = self._process.stdin
        os.set_blocking(self._input.fileno(), False)

    def tell(self, message: msgspec.Struct) -> None:
        """Have it know something. Such messages are few and small: the pipe holds all of them."""
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._input.fileno(), msgspec.json.encode(message) + b"\n")

    def reap(self) -> int:
        self._input.close()
        return super().reap()


class LocalServers:
    """The servers of a run on this host."""

    def __init__(
        self,
        numbers: Sequence[int],
        folder: Path,
        guard: Guard,
        *,
        keep: bool,
        address: str = "127.0.0.1",
        token: str | None = None,
        keys: str | None = None,
    ) -> None:
        """`numbers`: which of the run's servers are here. `keep`: each keeps a log in `folder`, to go on from after its
        death. `address`: of this machine, where they listen. `token`: what has to be known to them, if not a new one.
        """
        self.numbers = list(numbers)
        self._folder = folder.resolve()  # scripts may go elsewhere before they look for it
        self._guard = guard
        self._keep = keep
        self._keys = keys
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listeners = {
            number: socket.create_server((address, 0), family=family, backlog=1024) for number in self.numbers
        }
        write_secret(folder / TOKEN, (token or new_token()).encode())
        self.living: dict[int, ServerProcess] = {}
        self._known: dict[int, ReplicaNews] = {}  # by replica, of all hosts: what was heard last

    @property
    def addresses(self) -> dict[int, str]:
        """Where each of them listens."""
        return {number: _as_text(listener.getsockname()) for number, listener in self._listeners.items()}

    def place(self, container: str, addresses: Sequence[str]) -> ServersPlace:
        """What replicas are told of all the run's servers."""
        return ServersPlace(
            addresses=list(addresses), container=container, token_folder=str(self._folder), keys=self._keys
        )

    def start(self, number: int) -> ServerProcess:
        setting = ServerSetting(
            number=number,
            descriptor=self._listeners[number].fileno(),
            token_folder=str(self._folder),
            keys=self._keys,
            folder=str(self._folder / f"server-{number}") if self._keep else None,
        )
        log = self._folder / f"server-{number}.log"
        self.living[number] = ServerProcess(setting, log, self._guard)
        if number == 0:
            for news in self._known.values():
                self.living[0].tell(news)
        return self.living[number]

    def tell_chief(self, news: ReplicaNews) -> None:
        """Have the chief, if it is here, know whether it need not wait for a replica."""
        self._known[news.replica] = news
        if 0 in self.living:
            self.living[0].tell(news)

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
        for number in self.numbers if forget else ():
            shutil.rmtree(self._folder / f"server-{number}", ignore_errors=True)
        for listener in self._listeners.values():
            listener.close()


def _as_text(address: tuple[str, int]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
