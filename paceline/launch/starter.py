"""The starter: a process of a run that has loaded torch, and of which replicas and servers are forked.

    supervisor ── module, arguments, environment, descriptors ──▶ starter (torch, one thread) ── fork ──▶ replica
               ◀── its number ────────────────────────────────

So torch is loaded once a run and host instead of once a process: a second or two of a core for each but the first, also
when one is started again. What is forked becomes the supervisor's child: it is left an orphan, and the
supervisor adopts those (`guard.py`).

A script may set variables that torch looks at when it is loaded, before it imports it. One whose text names any has no
starter, and should what it imports set one, its process begins once more as a new Python (`starter_process.py`). A run
of one process has none either, unless it is there already because many runs are forked from one process that has torch
(`run_template.py`); nor has a script that imports neither torch nor paceline itself, nor whoever says
`PACELINE_PLAIN_TORCH=1`; and a run whose starter has died does without it.

This is the supervisor's side; `starter_process.py` is the other.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.launch.cores import thread_variables
from paceline.launch.guard import Guard
from paceline.launch.job import RunJob
from paceline.launch.with_parent import PARENT_VARIABLE
from paceline.strategy import Strategy
from paceline.torch_private import EXPORTER, wants_plain_torch

# Variables of libraries that are loaded with torch, and look at them once.
READ_AT_LOADING = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "DNNL_", "ONEDNN_", "ATEN_", "TORCH_", "PYTORCH_")
HARMLESS = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")  # scikit-learn sets them, for another OpenMP
MODULE = "paceline.launch.starter_process"
READY_STARTER = "PACELINE_STARTER"  # the starter that a run was forked with
READY = b"ready"
TRAINER, ON_SERVERS, SERVER = (
    "paceline.trainer",
    "paceline.central.replica.opening",
    "paceline.central.server.server",
)
MIRRORED = ("paceline.central.replica.only_tables", "paceline.mirrored.opening")
ROOM_FOR_COMMANDS = " " * 1024  # what is forked shows its own command line in the place of the starter's
LONGEST_FORK_S = 10.0
MOST_MESSAGE = 1 << 17


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a starter is asked for. With it come descriptors: standard input, output, error, and others."""

    module: str  # its `main` is what the process does
    arguments: list[str]
    environment: dict[str, str]
    descriptors: list[int]  # the numbers that those beyond the three are to have


class ReadyStarter(msgspec.Struct, frozen=True, kw_only=True):
    """A starter that is there already."""

    owner: int  # the one process that may use it: whatever it starts inherits its variables
    process: int
    channel: int


@dataclass(frozen=True)
class NewProcess:
    """A process that is to be started, as `python -m module arguments` would."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    streams: Sequence[int]  # descriptors of standard input, output and error
    descriptors: Sequence[int]  # others that it has under the same numbers


class ColdStart:
    """Starts each process as a new Python."""

    def ready(self) -> bool | None:
        """There is nothing to wait for."""
        return True

    def start(self, new: NewProcess) -> int:
        """Returns the number of the new process, which is a child of this one."""
        stdin, stdout, stderr = new.streams
        process = subprocess.Popen(
            [sys.executable, "-m", new.module, *new.arguments],
            env=dict(new.environment),
            start_new_session=True,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=tuple(new.descriptors),
        )
        process.returncode = 0  # whoever started it waits for it by its number
        return process.pid

    def close(self) -> None:
        """There is nothing to end."""


class WarmStart(ColdStart):
    """The starter, as the supervisor sees it."""

    def __init__(self, guard: Guard, process: int, channel: socket.socket) -> None:
        self._guard = guard
        self._process: int | None = process  # None when it has ended
        self._channel = channel
        self._is_ready = False
        guard.watch(process)

    def fileno(self) -> int:
        return self._channel.fileno()

    def ready(self) -> bool | None:
        """Returns True when processes can be started, by whichever way; None as long as that has to be waited for."""
        if self._process is not None and not self._is_ready:
            if not select.select([self._channel], [], [], 0)[0]:
                return None
            self._is_ready = self._hear(len(READY)) == READY
            if not self._is_ready:
                self.close()
        return True

    def start(self, new: NewProcess) -> int:
        """Returns the number of the new process, which is a child of this one."""
        if self._process is not None and self._is_ready:
            request = ForkRequest(
                module=new.module,
                arguments=list(new.arguments),
                environment=dict(new.environment),
                descriptors=list(new.descriptors),
            )
            with contextlib.suppress(OSError):  # it has ended, or the message is too long
                socket.send_fds(self._channel, [msgspec.msgpack.encode(request)], [*new.streams, *new.descriptors])
                if select.select([self._channel], [], [], LONGEST_FORK_S)[0] and (told := self._hear(16)):
                    return int(told)
            self.close()
        return super().start(new)

    def _hear(self, most: int) -> bytes:
        with contextlib.suppress(OSError):
            return self._channel.recv(most)
        return b""

    def close(self) -> None:
        """Ends it. What it has forked is the supervisor's."""
        if self._process is not None:
            self._channel.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
            self._guard.forget(self._process)
            self._process = None


def open_starter(job: RunJob, guard: Guard, threads: int) -> WarmStart | ColdStart:
    """Returns what starts the processes of a run on this host."""
    ready = _ready_made(guard)
    if job.module or wants_plain_torch() or not pays_for(job.script):
        if ready is not None:
            ready.close()
        return ColdStart()
    if ready is not None:
        return ready
    if job.place.rows + len(job.servers_here) < 2:
        return ColdStart()
    return _start_anew(guard, modules_of(job.place.strategy), threads)


def modules_of(strategy: Strategy) -> list[str]:
    """Returns what processes of such a run load sooner or later, beside torch."""
    modules = [TRAINER]
    modules += [ON_SERVERS] if strategy.on_servers else MIRRORED
    if strategy.server_processes:
        modules.append(SERVER)
    if strategy.split is not None and strategy.split.captures:
        modules.append(EXPORTER)
    return modules


def _ready_made(guard: Guard) -> WarmStart | None:
    told = os.environ.pop(READY_STARTER, "")
    ready = msgspec.json.decode(told, type=ReadyStarter) if told else None
    if ready is None or ready.owner != os.getpid():
        return None
    return WarmStart(guard, ready.process, socket.socket(fileno=ready.channel))


def _start_anew(guard: Guard, modules: Sequence[str], threads: int) -> WarmStart:
    """`modules`: what it loads beside torch. `threads`: of most processes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**thread_variables(threads), PARENT_VARIABLE: str(os.getpid())}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(theirs.fileno()), ",".join(modules), ROOM_FOR_COMMANDS],
            env={**os.environ, **environment, **guard.mark("starter")},
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    process.returncode = 0  # it is waited for by its number
    return WarmStart(guard, process.pid, ours)


def is_read_at_loading(variable: str) -> bool:
    """Returns whether torch, or a library that is loaded with it, looks at this variable just once.

    >>> [is_read_at_loading(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "KMP_INIT_AT_FORK")]
    [True, False, False]
    """
    return variable.startswith(READ_AT_LOADING) and variable not in HARMLESS


def pays_for(script: str) -> bool:
    """Returns whether a script imports torch, and names no variable that torch would look at then."""
    with contextlib.suppress(OSError):
        text = Path(script).read_bytes()
        imports = re.search(rb"^\s*(from torch\b|import (torch|paceline)\b)", text, re.MULTILINE)
        quoted = re.findall(rb"""["']([A-Z]+_[A-Z0-9_]+)["']""", text)
        return imports is not None and not any(is_read_at_loading(name.decode()) for name in quoted)
    return False
