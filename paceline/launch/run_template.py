"""The template of runs: a process that has loaded what `paceline run` needs, and of which every run is forked.

    owner ── arguments, cores, environment, where it prints ──▶ template (one thread) ── fork ──▶ paceline run
          ◀── a pidfd, a pipe for its exit code ──

So a run begins in milliseconds, not in the quarter of a second that Python takes to load a supervisor. If the template
loads torch, each run has a starter too (`starter.py`), so that its replicas begin in milliseconds, not in the second or
two that torch takes to load; which is right for every script that a starter is right for. The template computes
nothing. It dies with its owner, and runs with their template, however that happens. One that was killed is made anew
for the next run.

This is the owner's side; `cli/run_template_process.py` is the other.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence

import msgspec

from paceline.errors import LaunchError
from paceline.launch.starter import ROOM_FOR_COMMANDS
from paceline.launch.with_parent import PARENT_VARIABLE

MODULE = "paceline.cli.run_template_process"
MOST_TRIES = 3  # to have a run forked, each with a new template
MOST_MESSAGE = 1 << 20


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a template is asked for; with it come the descriptors of standard input, output and error."""

    arguments: list[str]  # of `paceline`
    environment: dict[str, str | None]  # what is to be changed there; None: is not there
    cores: list[int]  # the only ones that it may use; none: all
    folder: str  # in which it is
    module: str = ""  # that is to be run instead of `paceline`, which the arguments are of


class ForkedRun:
    """A process that a template has forked."""

    def __init__(self, pidfd: int, codes: int, number: int) -> None:
        """`codes`: the pipe in which its exit code will be. `number`: of the process."""
        self.number = number
        self.ended = codes  # readable when it has ended, until somebody has waited for it
        self._pidfd = pidfd
        self._code: int | None = None

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Returns its exit code, or minus a signal, if it ends within that time."""
        if self._code is None and _is_readable(self.ended, timeout_s):
            if not (told := os.read(self.ended, 64)):  # the template was killed, and so is the run
                _is_readable(self._pidfd, None)
            self._code = int(told) if told else -signal.SIGKILL
            os.close(self._pidfd)
            os.close(self.ended)
        return self._code

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal, unless it has ended."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


class RunTemplate:
    """The template, as its owner sees it."""

    def __init__(self, loads: Sequence[str] = (), *, environment: Mapping[str, str] | None = None) -> None:
        """`loads`: what replicas need (`modules_of`), and torch with it. `environment`: if it is not this process's."""
        self._loads = loads
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self, arguments: Sequence[str], output: int, *, cores: Collection[int] = (), environment: Mapping[str, str]
    ) -> ForkedRun:
        """Returns a new `paceline` with these arguments, in a session of its own, that prints to `output`."""
        request = RunRequest(
            arguments=list(arguments), environment=dict(environment), cores=sorted(cores), folder=os.getcwd()
        )
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            return self.fork(request, [nothing, output, output])
        finally:
            os.close(nothing)

    def fork(self, request: RunRequest, streams: Sequence[int]) -> ForkedRun:
        """Returns what was asked for, in a session of its own. `streams`: standard input, output and error."""
        for _ in range(MOST_TRIES):
            if self._process is None:
                self._open()
            try:
                socket.send_fds(self._channel, [msgspec.json.encode(request)], streams)
                number, (pidfd, codes), _, _ = socket.recv_fds(self._channel, 16, 2)
            except (OSError, ValueError):  # it has ended meanwhile
                self.close()
            else:
                return ForkedRun(pidfd, codes, int(number))
        raise LaunchError(f"the process that starts runs has ended {MOST_TRIES} times, see what it printed")

    def _open(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno()), ",".join(self._loads), ROOM_FOR_COMMANDS],
                env={
                    **(os.environ if self._environment is None else self._environment),
                    PARENT_VARIABLE: str(os.getpid()),
                },
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C is for the owner, which then ends the runs
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def close(self) -> None:
        """Ends it, and with it what still runs."""
        if self._process is not None:
            self._channel.close()
            self._process.kill()
            self._process.wait()
            self._process = None


def _is_readable(descriptor: int, timeout_s: float | None) -> bool:
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(None if timeout_s is None else 1000 * timeout_s))
