"""The template: a process that has run the script, and of which every process of the model is forked.

    owner (no torch) ── start: cores, descriptors ──▶ template (torch, the script, its model) ── fork ──▶ model process
                     ◀── its number, a pidfd ──────

So a script runs once, however many processes there are, and a process that died is replaced in milliseconds, not in the
seconds that torch takes to be imported. A template that died is started again with the next process that is wanted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

import msgspec

from paceline.errors import LaunchError
from paceline.serve.answering import ProcessEnds
from paceline.serve.served_tensor import ModelDescription
from paceline.split.values import Split
from paceline.trial_values import TrialPlace

MOST_TRIES = 3  # to have a process forked, each with a new template
_MOST_MESSAGE = 1 << 17


class TemplateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a template is started with."""

    script: str
    arguments: list[str]
    with_call: bool
    trial: TrialPlace | None = None  # that the model was trained in
    split: Split | None = None


class StartRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a template is asked for; with it come the descriptors of the process's ends, and of the checkpoint."""

    cores: list[int]
    path: str  # of the checkpoint, for sentences


class TemplateFound(msgspec.Struct, frozen=True):
    """A template's first word: the model, or why there is none."""

    description: ModelDescription | None
    problem: str = ""


class Template:
    """The template process, as the owner sees it."""

    def __init__(self, request: TemplateRequest) -> None:
        self._request = request
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.description: ModelDescription | None = None

    def open(self) -> ModelDescription:
        """Starts it, and returns what it has found. Waits for the script."""
        with self._lock:
            self._open()
            assert self.description is not None
            return self.description

    def start(self, request: StartRequest, descriptors: Sequence[int]) -> tuple[int, int]:
        """Returns the number of a new process of the model, and a pidfd of it."""
        with self._lock:
            for _ in range(MOST_TRIES):
                if self._process is None or self._process.poll() is not None:
                    self._open()
                try:
                    socket.send_fds(self._channel, [msgspec.msgpack.encode(request)], list(descriptors))
                    message, (pidfd, *_), _, _ = socket.recv_fds(self._channel, _MOST_MESSAGE, 1)
                except (OSError, ValueError):  # it has ended meanwhile
                    self._end()
                else:
                    return int(msgspec.msgpack.decode(message)), pidfd
            raise LaunchError(f"the process that runs the script has ended {MOST_TRIES} times, see what it printed")

    def close(self) -> None:
        """Ends it, also while it runs the script."""
        if (process := self._process) is not None:
            process.kill()  # whoever waits for it has the lock
        with self._lock:
            self._end()

    def _open(self) -> None:
        self._end()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lifeline, self._lifeline = os.pipe2(os.O_CLOEXEC)
        sys.stderr.flush()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline.serve.template_process", str(theirs.fileno()), str(lifeline)],
                pass_fds=(theirs.fileno(), lifeline),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what the script prints is not what this command prints
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(lifeline)
        found = TemplateFound(None, "the process that runs the script has ended")
        with contextlib.suppress(OSError):
            self._channel.send(msgspec.msgpack.encode(self._request))
            if message := self._channel.recv(_MOST_MESSAGE):
                found = msgspec.msgpack.decode(message, type=TemplateFound)
        if found.description is None:
            self._end()
            raise LaunchError(found.problem)
        self.description = found.description

    def _end(self) -> None:
        if self._process is None:
            return
        self._channel.close()
        os.close(self._lifeline)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._process = None


class FromTemplate:
    """Starts processes of one version; a `Starter` of `ModelProcess`."""

    def __init__(self, template: Template, path: str, checkpoint: int) -> None:
        """`checkpoint`: the descriptor of the version's copy."""
        self._template, self._path, self._checkpoint = template, path, checkpoint

    def start(self, ends: ProcessEnds, cores: Sequence[int]) -> tuple[int, int]:
        """Returns the new process's number, and a pidfd of it."""
        request = StartRequest(cores=list(cores), path=self._path)
        return self._template.start(request, [*ends.descriptors, self._checkpoint])
