"""The servers of a run on this host: processes that only own, started by the supervisor, and started again by it.

    a server …                        with --durability            without
    is killed (also by SIGTERM)       is started again             the run ends: its parameters are gone
    ends by itself                    the run ends, with its last words

Each listens on a socket that the supervisor has opened before, and keeps open: replicas know the addresses from the
start, and while a server is being started again, whoever calls it simply waits in the queue of that socket.

A replica that ends before it has come to the servers is expected there. On one host the other replicas see on the board
that it has, and say so; of several hosts the supervisors tell each other, and the one that has the chief tells it, by a
line on its standard input.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.guard import Guard
from paceline.launch.host_messages import ReplicaNews
from paceline.launch.job import RunJob
from paceline.launch.reporter import Reporter, at, below, signal_name
from paceline.launch.restarts import Restarts
from paceline.launch.server_process import KeepModels, ServerProcess, ServerSetting
from paceline.launch.starter import ColdStart
from paceline.net.secure import TOKEN, new_token, write_secret
from paceline.run_place import ServersPlace

KEEP_WITHIN_S = 60.0


@dataclass(frozen=True)
class ServerLost:
    """Why a run ends with one of its servers."""

    exit_code: int
    sentence: str


class NoServers:
    """Those of a run that starts none, or has not come so far."""

    def tell_chief(self, news: ReplicaNews) -> None:
        """There is no chief among them."""

    def keep_models(self, folder: Path) -> None:
        """There are none."""

    def close(self, *, forget: bool) -> None:
        """There is nothing to end."""


class LocalServers:
    """The servers of a run on this host."""

    def __init__(
        self, job: RunJob, starter: ColdStart, guard: Guard, reporter: Reporter, restarts: Restarts, address: str
    ) -> None:
        """`address`: of this machine, where they listen."""
        self._job = job
        self._starter, self._guard = starter, guard
        self._reporter = reporter
        self._restarts = restarts
        self._folder = reporter.folder.path.resolve()  # scripts may go elsewhere before they look for it
        self._durable = job.place.strategy.durable  # each keeps a log, to go on from after its death
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listeners = {
            number: socket.create_server((address, 0), family=family, backlog=1024) for number in job.servers_here
        }
        write_secret(self._folder / TOKEN, (job.token or new_token()).encode())
        self._living: dict[int, ServerProcess] = {}
        self._known: dict[int, ReplicaNews] = {}  # by replica, of all hosts: what was heard last

    @property
    def addresses(self) -> dict[int, str]:
        """Where each of them listens."""
        return {number: _as_text(listener.getsockname()) for number, listener in self._listeners.items()}

    def place(self, container: str, addresses: Sequence[str]) -> ServersPlace:
        """What replicas are told of all the run's servers."""
        return ServersPlace(
            addresses=list(addresses), container=container, token_folder=str(self._folder), keys=self._job.keys
        )

    def start_all(self) -> list[ServerProcess]:
        return [self._start(number) for number in self._listeners]

    def _start(self, number: int) -> ServerProcess:
        setting = ServerSetting(
            number=number,
            descriptor=self._listeners[number].fileno(),
            token_folder=str(self._folder),
            keys=self._job.keys,
            folder=str(self._folder / f"server-{number}") if self._durable else None,
        )
        server = ServerProcess(setting, self._folder / f"server-{number}.log", self._starter, self._guard)
        self._living[number] = server
        self._reporter.event("server started", server=number, pid=server.pid)
        if number == 0:
            for news in self._known.values():
                server.tell(news)
        return server

    def tell_chief(self, news: ReplicaNews) -> None:
        """Have the chief, if it is here, know whether it need not wait for a replica."""
        self._known[news.replica] = news
        if 0 in self._living:
            self._living[0].tell(news)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────────

    def reap(self, server: ServerProcess) -> int:
        """After its end: its exit code, or minus the signal that killed it."""
        del self._living[server.number]
        return server.reap()

    def follow(self, number: int, code: int, step: int) -> ServerProcess | ServerLost:
        """Start another process in the place of one that has ended so; or tell why the run ends with it."""
        self._restarts.deaths += 1
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
        what = f"server {number} {how} {at(step)}"
        self._reporter.event("server ended", server=number, code=code, step=step)
        if self._durable and code < 0 and self._restarts.left:
            self._reporter.say(f"{what}; it is started again {self._restarts.count()}")
            return self._start(number)
        lost = "" if self._durable else "; its parameters are gone (--durability log would have kept them)"
        words = below(self._last_words(number)) if code >= 0 else ""
        self._reporter.say(f"{what}{lost}, the run ends{words}")
        return ServerLost(128 - code if code < 0 else max(1, code), f"{what}{lost}")

    def _last_words(self, number: int) -> str:
        with contextlib.suppress(OSError):
            return (self._folder / f"server-{number}.log").read_text(errors="replace")[-4096:]
        return ""

    def keep_models(self, folder: Path) -> None:
        """Have the chief, if all servers are here and alive, write its containers into that folder, and end."""
        if 0 in self._living and len(self._living) == len(self._listeners):
            self._living[0].tell(KeepModels(str(folder.resolve())))
            self._living[0].has_ended(KEEP_WITHIN_S)

    def close(self, *, forget: bool) -> None:
        """End all. `forget`: what they have written to go on from is not needed any more."""
        for server in list(self._living.values()):
            server.send(signal.SIGKILL)
            self.reap(server)
        for number, listener in self._listeners.items():
            listener.close()
            if forget:
                shutil.rmtree(self._folder / f"server-{number}", ignore_errors=True)


def _as_text(address: tuple[str, int]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
