"""A process of a model, from inside: it makes its model, says that it is ready, and answers until its owner is gone.

    owner ── number, bytes ─▶ socket ─▶ reads the request ─▶ model ─▶ writes the answer ─▶ kind, number, bytes ─▶ owner

A request that fails is answered with a sentence, and the next is taken. The process ends when the owner closes its end
of the socket. One that computes meanwhile would not notice that: so there is a second pipe, the *lifeline*, into which
nobody ever writes. Its only event is the owner's end, of which the kernel tells by SIGIO, whose default is to end the
process, wherever it is in its computing.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import gc
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from paceline.errors import PacelineError, ReplicaDied
from paceline.forked import end_with_parent
from paceline.serve.shared_values import NotSharable, SharedValues

QUESTION = struct.Struct("=QQ")  # number, bytes of the request
REPLY = struct.Struct("=BQQd")  # kind, number, bytes of the answer, seconds of computing
# That the next question is looked for before the process sleeps, if the last came that soon. Longer than being woken
# takes on a busy machine: else a client who had to wait for that once asks too late the next time, and waits again.
AWAKE_S = 0.003

AnswerFunction = Callable[..., Any]
Factory = Callable[[], AnswerFunction]


class ReplyKind(enum.IntEnum):
    """What a process says."""

    READY = 0  # its model is made
    BROKEN = 1  # its model could not be made; the answer says why, and the process ends
    ANSWER = 2
    FAILURE = 3  # of this request; the answer says why


@dataclass(frozen=True)
class ProcessEnds:
    """What the process of a model has of its owner: where it is asked, where values lie, and the owner's life."""

    channel: socket.socket
    requests: SharedValues
    answers: SharedValues
    lifeline: int

    @property
    def descriptors(self) -> list[int]:
        return [self.channel.fileno(), self.requests.descriptor, self.answers.descriptor, self.lifeline]


def be_model_process(
    ends: ProcessEnds, factory: Factory, cores: Sequence[int], *, kept: Sequence[int] = (), parent: int | None = None
) -> NoReturn:
    """Makes this process, just forked, the process of a model: it answers with `factory()` and ends with its owner.

    It runs one thread on `cores`, without gradients, and a module in eval mode. `kept`: further descriptors that the
    factory needs. `parent`: the owner's process, if that has forked this one from its main thread.
    """
    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the owner decides
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGIO):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        _let_go_of_all_but([*ends.descriptors, *kept])
        end_with_owner(ends.lifeline, parent)
        _use(cores)
        _answer_all(ends, factory)
        status = 0
    except (BrokenPipeError, ConnectionResetError):
        status = 0  # the owner has gone away
    except ReplicaDied as error:
        print(f"paceline: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


def _answer_all(ends: ProcessEnds, factory: Factory) -> None:
    def reply(kind: ReplyKind, number: int, size: int, seconds: float = 0.0) -> None:
        ends.channel.send(REPLY.pack(kind, number, size, seconds))

    began = time.perf_counter()
    try:
        answer = factory()
        if callable(to_eval_mode := getattr(answer, "eval", None)):
            to_eval_mode()
    except BaseException as error:
        reply(ReplyKind.BROKEN, 0, ends.answers.write(in_a_sentence(error)))
        return
    gc.collect()
    gc.freeze()  # what was made so far stays; Python's collector need not look at it again
    reply(ReplyKind.READY, 0, 0, time.perf_counter() - began)
    soon = False  # whether the last question came as soon as this process had answered the one before
    while question := _next_question(ends.channel, soon):
        number, size = QUESTION.unpack(question)
        soon = time.perf_counter() - began < AWAKE_S
        began = time.perf_counter()
        try:
            args, kwargs = ends.requests.read(size, torch_tensors=True)
            length = ends.answers.write(answer(*args, **kwargs))
        except NotSharable as what:
            length = ends.answers.write(f"the model answers with {what}: let it return tensors, in lists or dicts")
            reply(ReplyKind.FAILURE, number, length, time.perf_counter() - began)
        except ReplicaDied:
            raise  # a device of the model is no more: this process cannot answer, and another is started
        except Exception as error:
            length = ends.answers.write(in_a_sentence(error))
            reply(ReplyKind.FAILURE, number, length, time.perf_counter() - began)
        else:
            reply(ReplyKind.ANSWER, number, length, time.perf_counter() - began)
        began = time.perf_counter()


def _next_question(channel: socket.socket, soon: bool) -> bytes:
    """Returns the next question; nothing if there will be none. Being woken takes longer than to ask and to answer: so
    a process that is asked all the time looks for a while, and gives way to others between two looks."""
    awake_until = time.perf_counter() + AWAKE_S
    while soon and time.perf_counter() < awake_until:
        try:
            return channel.recv(QUESTION.size, socket.MSG_DONTWAIT)
        except BlockingIOError:
            os.sched_yield()
    return channel.recv(QUESTION.size)


def in_a_sentence(error: BaseException) -> str:
    """Returns an error as text for somebody else's eyes: ours as they are, others with their type."""
    text = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
    return text.encode(errors="replace").decode()


def _let_go_of_all_but(kept: Sequence[int]) -> None:
    """Has every other descriptor lead nowhere: a port, a file, another process's lifeline are their owner's alone.

    They are not closed, since whoever had one may still close its number, and would then close somebody else's.
    """
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > 2 and descriptor != nowhere and descriptor not in kept:
            with contextlib.suppress(OSError):  # the one that was listing them
                os.fstat(descriptor)
                os.dup2(nowhere, descriptor, inheritable=False)


def end_with_owner(lifeline: int, parent: int | None = None) -> None:
    """Has this process end when the other end of the lifeline is closed, or when its parent ends."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if parent is not None:
        end_with_parent(parent)


def _use(cores: Sequence[int]) -> None:
    """One thread on these cores, and no gradients: a process that was forked cannot have its parent's threads."""
    if cores:
        os.sched_setaffinity(0, cores)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
