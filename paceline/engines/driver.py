"""Where the user is: starts all hosts of a run when all agents are there, and ends them together.

    agents ──ready──▶ all are there: where is host 0? ──begins──▶ every host ──printed──▶ the user's terminal
                                                     ◀──signals──  Ctrl-C
                                                      ──ended──▶   exit code

What is decided here is what is decided for emulated hosts (`launch/hosts.py`): the first exit code that is not 0 is the
run's, and ends the others at once; if the hosts' supervisors meet they know themselves what to do, and the code is that
of host 0. A host that is gone has ended with code 1.
"""

from __future__ import annotations

import math
import os
import selectors
import shutil
import signal
import sys
import time
from collections.abc import Callable

from paceline.engines.messages import (
    AgentReady,
    FromAgent,
    HostBegins,
    HostEnded,
    HostGone,
    HostPrinted,
    HostRefused,
    HostSignal,
)
from paceline.engines.setting import EngineHosts, EngineSetting
from paceline.errors import LaunchError
from paceline.launch.ending import END_GRACE_S, STOP_GRACE_S
from paceline.launch.signals import signals_as_bytes
from paceline.run_place import INTERRUPTED
from paceline.watch.output import put
from paceline.watch.target import NOT_REACHED

LOOK_EVERY_S = 1.0
SAY_AFTER_S = 5.0  # that hosts are waited for

Commands = Callable[[int, str], list[str]]  # arguments of `paceline` by host and rendezvous


class Driver:
    """Runs a command on every host that an engine has."""

    def __init__(
        self, hosts: EngineHosts, setting: EngineSetting, commands: Commands, *, meet: bool, quiet: bool = False
    ) -> None:
        self._hosts = hosts
        self._setting = setting
        self._commands = commands
        self._meet = meet
        self._quiet = quiet
        self._ready: dict[int, AgentReady] = {}
        self._running: set[int] = set()
        self._said: set[bytes] = set()
        self._exit_code: int | None = None
        self._interrupted = 0  # how often
        self._kill_at = math.inf

    def run(self, *, folder: str | None, token: str | None) -> int:
        """From the first agent to the end of the last host; the exit code."""
        with signals_as_bytes() as self._signals, selectors.DefaultSelector() as self._selector:
            self._selector.register(self._signals, selectors.EVENT_READ)
            self._selector.register(self._hosts.fileno(), selectors.EVENT_READ)
            if not self._gather():
                return INTERRUPTED
            self._check_versions()
            self._begin(folder, token)
            while self._running:
                self._wait()
                for message in self._hosts.read():
                    self._take(message)
                if time.monotonic() > self._kill_at:
                    left = ", ".join(map(str, sorted(self._running)))
                    _say(f"host {left} does not end: it is left to {self._setting.engine} to end it")
                    return self._exit_code or (INTERRUPTED if self._interrupted else 1)
        return self._exit_code or 0

    def _wait(self) -> None:
        """Until something happens, or for a moment; requests to stop are passed on."""
        for key, _ in self._selector.select(LOOK_EVERY_S):
            if key.fd == self._signals:
                for number in os.read(self._signals, 64):
                    self._interrupted += 1
                    self._pass_on(number)
                    if self._interrupted > 1 or number == signal.SIGQUIT:
                        self._kill_at = min(self._kill_at, time.monotonic() + 2 * END_GRACE_S)
                    else:
                        self._kill_at = time.monotonic() + STOP_GRACE_S + 6 * END_GRACE_S  # they end by themselves

    def _pass_on(self, number: int) -> None:
        for host in sorted(self._running):
            self._hosts.send(HostSignal(host=host, number=number))

    # ── before ───────────────────────────────────────────────────────────────────────────────────────────

    def _gather(self) -> bool:
        """Wait for an agent on every host; whether nobody has asked to stop meanwhile."""
        began, said = time.monotonic(), False
        while len(self._ready) < self._setting.hosts:
            self._wait()
            if self._interrupted:
                return False
            for message in self._hosts.read():
                if isinstance(message, AgentReady):
                    self._ready[message.host] = message
                elif isinstance(message, HostGone):
                    raise LaunchError(f"host {message.host} could not be started: {message.why}")
            waited = time.monotonic() - began
            missing = [host for host in range(self._setting.hosts) if host not in self._ready]
            if missing and waited > self._setting.timeout_s and self._setting.engine == "ray":
                raise LaunchError(
                    f"host {missing[0]} was not there within {self._setting.timeout_s:g} s:"
                    " look at `ray status`, or give --timeout more"
                )
            if missing and waited > SAY_AFTER_S and not said and not self._quiet:
                said = True
                count = f"{len(missing)} of {self._setting.hosts} hosts"
                _say(f"waiting for {count} from {self._setting.engine}; Ctrl-C ends it")
        return True

    def _check_versions(self) -> None:
        first = self._ready[0]
        for host, ready in sorted(self._ready.items()):
            for package, version in ready.versions.items():
                if version != first.versions[package]:
                    raise LaunchError(
                        f"{package} is {version} on host {host} ({ready.node}) and {first.versions[package]} on host 0"
                        f" ({first.node}): install the same everywhere"
                    )

    def _begin(self, folder: str | None, token: str | None) -> None:
        rendezvous = f"{self._ready[0].address}:{self._ready[0].port}"
        terminal = shutil.get_terminal_size() if sys.stderr.isatty() else None
        for host in range(self._setting.hosts):
            seen = (terminal.columns, terminal.lines) if terminal is not None and host == 0 else None
            self._running.add(host)
            self._hosts.send(
                HostBegins(
                    host=host,
                    arguments=self._commands(host, rendezvous),
                    folder=folder,
                    token=token,
                    terminal=seen,
                    all_there=sys.stdout.isatty(),
                )
            )

    # ── while it runs ────────────────────────────────────────────────────────────────────────────────────

    def _take(self, message: FromAgent | HostGone) -> None:
        if isinstance(message, HostPrinted):
            self._show(message)
        elif isinstance(message, HostRefused):
            _say(f"host {message.host} cannot begin: {message.sentence}")
            self._on_end(message.host, 2)
        elif isinstance(message, HostEnded):
            self._on_end(message.host, message.code if message.code >= 0 else 128 - message.code)
        elif isinstance(message, HostGone) and message.host in self._running:
            what = f"host {message.host} ({self._ready[message.host].node}) is gone: {message.why}"
            _say(what if self._others_go_on(message.host) else f"{what}; the run ends")
            self._on_end(message.host, 1)

    def _others_go_on(self, host: int) -> bool:
        """Whether it is for the hosts themselves to say what follows from its end."""
        return self._meet and host != 0

    def _show(self, printed: HostPrinted) -> None:
        """What hosts say alike, such as what is wrong with a flag, is shown once."""
        if printed.error and self._setting.hosts > 1:
            known = printed.data in self._said
            self._said.add(printed.data) if len(self._said) < 1000 else None
            if known and printed.host:
                return
        put(sys.stderr if printed.error else sys.stdout, printed.data)

    def _on_end(self, host: int, code: int) -> None:
        self._running.discard(host)
        if self._meet:
            if host == 0:
                self._exit_code = code
                self._end_soon()
        elif code and not self._exit_code:
            self._exit_code = code
            if not self._interrupted and code != NOT_REACHED:  # who was asked to stop may be saving
                self._pass_on(signal.SIGQUIT)
                self._end_soon()

    def _end_soon(self) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + 4 * END_GRACE_S)


def _say(sentence: str) -> None:
    put(sys.stderr, f"paceline: {sentence}\n".encode())
