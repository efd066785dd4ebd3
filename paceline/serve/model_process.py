"""One process that answers for one model, as its owner sees it.

    process = ModelProcess(ForkHere(lambda: Net().eval()), cores=(0,))
    number = process.ask(image)           # returns at once
    selectors.register(process, EVENT_READ)
    for event in process.events():        # when `process` is readable: never waits
        …                                 # Ready, Answered(number, value, …), Failed(number, reason, …), Died(reason)

Tensors lie in shared memory (`shared_values.py`); who has to read something is told by a few bytes in a socket. The
process and the owner each have one side of it: an answer that the owner did not wait for is still the answer to its own
number, and is never taken for that to a later question. A process is asked one thing at a time; while it is at it, it
is not `free`.

`fileno()` is readable when there are events: answers, and the end of the process, however it came (a pidfd). So one
owner waits for many of them, with `selectors` or asyncio's `add_reader`, and never has to look. It stays the same
number when the process is started again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.errors import PacelineError, ReplicaDied, Stalled
from paceline.forked import fork_to_compute
from paceline.serve.answering import QUESTION, REPLY, Factory, ProcessEnds, ReplyKind, be_model_process
from paceline.serve.shared_values import SharedValues

LONGEST_END_S = 2.0  # that a process may take to end by itself


@dataclass(frozen=True)
class Ready:
    """The model is made, and was so in that many seconds. A process may be asked before, and answers then."""

    seconds: float


@dataclass(frozen=True)
class Answered:
    """What the model has answered to the question of this number; `seconds` of them in the process itself."""

    number: int
    value: Any
    seconds: float


@dataclass(frozen=True)
class Failed:
    """The question of this number has no answer, because of what the model raised. The process goes on."""

    number: int
    reason: str
    seconds: float


@dataclass(frozen=True)
class Died:
    """The process has ended: by itself, as its model could not be made (`broken`: another process could not make it
    either), or by a signal. `asked`: the question that it had not answered, if there was one."""

    reason: str
    asked: int | None
    broken: bool = False


Event = Ready | Answered | Failed | Died


class Starter(Protocol):
    """Who makes the process: by forking here, or by asking another process to fork."""

    def start(self, ends: ProcessEnds, cores: Sequence[int]) -> tuple[int, int]:
        """Returns the new process's number, and a pidfd of it."""


class ForkHere:
    """Forks the process from this one, so that it has whatever `factory` needs without anybody having to describe it.

    `factory()` is called in the new process, and returns the model, which is put into eval mode, or anything that is
    called as `answer(*args, **kwargs)`.
    """

    def __init__(self, factory: Factory) -> None:
        self._factory = factory

    def start(self, ends: ProcessEnds, cores: Sequence[int]) -> tuple[int, int]:
        """Returns the new process's number, and a pidfd of it."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()  # else what is in it would be printed twice
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        if not (process := fork_to_compute()):
            be_model_process(ends, self._factory, cores, parent=parent)
        return process, os.pidfd_open(process)


class ModelProcess:
    """The process of a model: asked, heard, killed and started again from here. It ends with its owner."""

    def __init__(
        self, starter: Starter, *, name: str = "model", cores: Sequence[int] = (), torch_tensors: bool = True
    ) -> None:
        """Starts it. `cores`: those it is pinned to, with one thread; none: where this process may run.
        `torch_tensors`: answers have torch's tensors in them, else NumPy's arrays."""
        self.name, self.cores = name, tuple(cores)
        self.asked: int | None = None  # the question it is at
        self.ready = False
        self.alive = False
        self.starts = 0
        self.process = 0  # its number
        self._starter, self._torch_tensors = starter, torch_tensors
        self._numbers = 0
        self._waiting = select.epoll()
        self._start()

    # ── asking ───────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, *args: Any, **kwargs: Any) -> int:
        """Has the process compute `model(*args, **kwargs)`, and returns the question's number at once."""
        if not self.free:
            raise PacelineError(f"process {self.name} is at question {self.asked}: ask it when it is free")
        size = self._requests.write((args, kwargs))
        self._numbers += 1
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died: its pidfd will say so
            self._channel.send(QUESTION.pack(self._numbers, size))
        self.asked = self._numbers
        return self._numbers

    @property
    def free(self) -> bool:
        """Returns whether it may be asked: it lives, and has answered everything."""
        return self.alive and self.asked is None

    def fileno(self) -> int:
        """Returns the descriptor that is readable when there are events."""
        return self._waiting.fileno()

    def events(self, *, may_have_ended: bool = True) -> list[Event]:
        """Returns what has happened since the last call, without waiting: the next thing, if there are several. An end
        is not looked for unless it `may_have_ended`: whoever looks for an answer all the time has no time for that."""
        if not self.alive:
            return []
        if not (reply := self._next_reply()):
            if not may_have_ended or not any(descriptor == self._pidfd for descriptor, _ in self._waiting.poll(0)):
                return []
            reply = self._next_reply()  # what it has said before it ended is heard first
        return [self._heard(reply) if reply else self._over(_how(self._ended_with()))]

    def wait(self, timeout_s: float) -> list[Event]:
        """Returns the next events, and waits for them; for an owner that has nothing else to do."""
        deadline = time.monotonic() + timeout_s
        while True:
            if found := self.events():
                return found
            if not self.alive:
                raise ReplicaDied(f"process {self.name} has ended: start it again")
            left = deadline - time.monotonic()
            if left <= 0:
                raise Stalled(f"process {self.name} has said nothing for {timeout_s:g} s")
            self._waiting.poll(left)

    # ── its life ─────────────────────────────────────────────────────────────────────────────────────────────

    def kill(self) -> None:
        """Ends the process at once, whatever it is at. There will be no event of it."""
        if not self.alive:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._over("it was killed by its owner")

    def start_again(self) -> None:
        """Starts a new process in the place of this one, which is killed if it lives. Questions' numbers go on."""
        self.kill()
        self._start()

    def close(self) -> None:
        """Lets the process end: it does when it has nothing to compute, and is killed if it takes long."""
        if self.alive:
            self._waiting.unregister(self._channel)
            self._channel.close()
            if not self._waiting.poll(LONGEST_END_S):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._over("it was closed")
        self._waiting.close()

    def __enter__(self) -> ModelProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        with contextlib.ExitStack() as started, contextlib.ExitStack() as failed:  # what is closed then
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            started.callback(theirs.close)
            failed.callback(self._channel.close)
            self._requests = failed.enter_context(contextlib.closing(SharedValues.create()))
            self._answers = failed.enter_context(contextlib.closing(SharedValues.create()))
            lifeline, self._lifeline = os.pipe2(os.O_CLOEXEC)
            started.callback(os.close, lifeline)
            failed.callback(os.close, self._lifeline)
            ends = ProcessEnds(theirs, self._requests, self._answers, lifeline)
            self.process, self._pidfd = self._starter.start(ends, self.cores)
            failed.pop_all()
        self._channel.setblocking(False)
        self._waiting.register(self._channel, select.EPOLLIN)
        self._waiting.register(self._pidfd, select.EPOLLIN)
        self.asked, self.ready, self.alive = None, False, True
        self.starts += 1

    def _next_reply(self) -> bytes:
        try:
            return self._channel.recv(REPLY.size)
        except (BlockingIOError, ConnectionResetError):
            return b""

    def _heard(self, reply: bytes) -> Event:
        kind, number, size, seconds = REPLY.unpack(reply)
        if kind == ReplyKind.READY:
            self.ready = True
            return Ready(seconds)
        value = self._answers.read(size, torch_tensors=self._torch_tensors)
        if kind == ReplyKind.BROKEN:
            return self._over(value, broken=True)
        self.asked = None
        return Answered(number, value, seconds) if kind == ReplyKind.ANSWER else Failed(number, value, seconds)

    def _over(self, reason: str, *, broken: bool = False) -> Died:
        """Lets go of a process that has ended, or is about to."""
        died = Died(reason, self.asked, broken)
        self.asked, self.ready, self.alive = None, False, False
        for end in (self._channel, self._pidfd):
            with contextlib.suppress(OSError, ValueError):
                self._waiting.unregister(end)
        self._channel.close()
        os.close(self._lifeline)
        with contextlib.suppress(ChildProcessError):  # of one that somebody else has forked
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        os.close(self._pidfd)
        self._requests.close()
        self._answers.close()
        return died

    def _ended_with(self) -> int | None:
        """Returns its exit code, below 0 for a signal; None if somebody else has forked it."""
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
            if ended is not None:
                return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return None


def _how(code: int | None) -> str:
    """
    >>> _how(-9), _how(1), _how(None)
    ('it was killed by signal 9 (SIGKILL)', 'it ended with exit code 1', 'it has ended')
    """
    if code is None:
        return "it has ended"
    return (
        f"it was killed by signal {-code} ({signal.Signals(-code).name})"
        if code < 0
        else f"it ended with exit code {code}"
    )
