"""Versions straight from a training: the parameters that servers hold, taken after one step, while it goes on.

    HTTP (no torch) ── which step? take it ──▶ follower (torch) ── freeze, read, thaw ──▶ servers
                    ◀── step, a copy in memory ─

The follower is a process of its own (`follower_process`), since whoever speaks with servers needs torch. When the
servers cannot be reached, or it has died, that is the source's `problem`, and the version that is there answers on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import msgspec

from paceline.errors import LaunchError
from paceline.serve.version_source import TakenVersion

_MOST_MESSAGE = 1 << 17


class FollowRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a follower is started with."""

    addresses: list[str]
    container: str
    token: str = ""
    keys: str | None = None  # the folder

    @property
    def words(self) -> str:
        """Returns it for a sentence."""
        return f"container {self.container} at {','.join(self.addresses)}"


class FollowQuestion(msgspec.Struct, frozen=True):
    """What it is asked: after which step the container is; with `take`, for a copy of it too."""

    take: bool = False


class FollowReply(msgspec.Struct, frozen=True):
    """A step, with which the descriptor of a copy comes if there is one; or what is wrong."""

    step: int = 0
    problem: str = ""


class FollowedContainer:
    """A container whose newest step is a new version, at most one in `every_s` seconds; a `VersionSource`."""

    def __init__(self, request: FollowRequest, every_s: float) -> None:
        self.words, self.problem = request.words, ""
        self._request, self._every_s = request, every_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._step, self._taken_at = -1, 0.0

    def take(self) -> TakenVersion:
        """Returns a copy of the container after some step, the same on all servers."""
        reply, copies = self._ask(FollowQuestion(take=True))
        if reply.problem:
            raise LaunchError(reply.problem)
        self.problem, self._step, self._taken_at = "", reply.step, time.monotonic()
        return TakenVersion(copies[0], reply.step)

    def has_changed(self) -> bool:
        """Returns whether steps were made since the last one that was taken."""
        if time.monotonic() - self._taken_at < self._every_s:
            return False
        reply, _ = self._ask(FollowQuestion())
        self.problem = f"{self.words} cannot be followed: {reply.problem}" if reply.problem else ""
        return not reply.problem and reply.step != self._step

    def close(self) -> None:
        """Ends the follower."""
        if (process := self._process) is not None:
            process.kill()  # whoever waits for it has the lock
        with self._lock:
            self._end()

    def _ask(self, question: FollowQuestion) -> tuple[FollowReply, list[int]]:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                self._channel.send(msgspec.msgpack.encode(question))
                message, descriptors, _, _ = socket.recv_fds(self._channel, _MOST_MESSAGE, 1)
            except OSError:
                message, descriptors = b"", []
            if message:
                return msgspec.msgpack.decode(message, type=FollowReply), descriptors
            self._end()
            return FollowReply(problem="the process that follows it has ended, and is started again"), []

    def _start(self) -> None:
        self._end()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lifeline, self._lifeline = os.pipe2(os.O_CLOEXEC)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline.serve.follower_process", str(theirs.fileno()), str(lifeline)],
                pass_fds=(theirs.fileno(), lifeline),
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(lifeline)
        with contextlib.suppress(OSError):
            self._channel.send(msgspec.msgpack.encode(self._request))

    def _end(self) -> None:
        if self._process is not None:
            self._channel.close()
            os.close(self._lifeline)
            self._process.kill()
            self._process.wait()
            self._process = None
