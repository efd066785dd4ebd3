"""Members of an ensemble in a process each: one that crashes or hangs takes nobody with it.

    callers' threads ── question ─▶ the owner's thread ── ask ─▶ process 0 │ process 1 │ process 2
    callers' threads ◀── answers ── the owner's thread ◀─────── answered, failed, died

One thread owns all processes: it alone asks them, hears them, and starts one again that has died. A process is asked
one question at a time. The questions behind it wait here, and those whose callers have left are never sent.

Nobody waits for a process that is being started again: it is missing in the answers meanwhile.
"""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from paceline.ensemble.placement import MemberDevice
from paceline.ensemble.question import CLOSED, Question, next_open
from paceline.errors import ModelError, ReplicaDied, Stalled
from paceline.serve.answering import in_a_sentence
from paceline.serve.model_process import Answered, Died, Failed, ForkHere, ModelProcess, Ready

_LONGEST_START_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # before one is started again that dies as soon as it is


class MembersBetween:
    """All members, each in a process that is forked from this one."""

    def __init__(self, members: Sequence[Callable[..., Any]], names: Sequence[str], devices: Sequence[MemberDevice]):
        self._members: list[_MemberProcess] = []
        try:
            for number, (member, name, device) in enumerate(zip(members, names, devices, strict=True)):
                process = ModelProcess(ForkHere(_factory(member, device)), name=name, cores=device.cores)
                self._members.append(_MemberProcess(number, process))
            for started in self._members:
                started.wait_until_ready()
        except BaseException:
            for started in self._members:
                started.process.close()
            raise
        self._asked: queue.SimpleQueue[Question] = queue.SimpleQueue()
        self._ended = False
        self._closing = threading.Lock()  # nothing is asked any more once it has ended
        self._bell, self._ringer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="owner of an ensemble's processes", daemon=True)
        self._thread.start()

    @property
    def processes(self) -> list[int]:
        """The numbers of the members' processes, as they are now."""
        return [member.process.process for member in self._members]

    @property
    def ready(self) -> list[bool]:
        """Whether each member has a process that answers."""
        return [member.process.ready for member in self._members]

    def ask(self, question: Question) -> None:
        """Hands the question to every member, and returns at once."""
        with self._closing:
            if not self._ended:
                self._asked.put(question)
                self._ring()
                return
        for member in self._members:
            question.fail(member.number, CLOSED)

    def close(self) -> None:
        """Ends the processes: those that compute for long are killed."""
        with self._closing:
            self._ended = True
            self._ring()
        self._thread.join()
        os.close(self._ringer)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it rings already
            os.write(self._ringer, b"!")

    # ── in the owner's thread ────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            for member in self._members:
                selector.register(member.process, selectors.EVENT_READ)
            while not self._ended:
                pauses = [member.pause_s for member in self._members if not member.process.alive]
                for key, _ in selector.select(min(pauses, default=None)):
                    if key.fileobj == self._bell:
                        os.read(self._bell, 4096)
                for member in self._members:
                    member.hear()
                self._take_questions()
                for member in self._members:
                    member.work()
        self._take_questions()
        for member in self._members:
            member.give_up(CLOSED)
            member.process.close()
        os.close(self._bell)

    def _take_questions(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                question = self._asked.get_nowait()
                for member in self._members:
                    member.take(question)


@dataclass
class _MemberProcess:
    """One member: its process, the question that is in it, and those behind."""

    number: int
    process: ModelProcess
    waiting: collections.deque[Question] = field(default_factory=collections.deque)
    inside: Question | None = None
    inside_number: int = 0
    died_of: str = ""
    early_deaths: int = 0  # in a row, before it was ready
    start_at: float = 0.0

    def wait_until_ready(self) -> None:
        """Returns when the process has its model; raises if it cannot make it."""
        try:
            (event, *_) = self.process.wait(_LONGEST_START_S)
        except (Stalled, ReplicaDied) as error:
            event = Died(str(error), None)
        if isinstance(event, Died):
            raise ModelError("member", self.process.name, f"it could not be started ({event.reason}), give another")

    @property
    def pause_s(self) -> float:
        """How long it is until a dead one is started again."""
        return max(0.0, self.start_at - time.monotonic())

    def hear(self) -> None:
        """Passes on what the process has said, each answer to the question that it is of."""
        for event in self.process.events():
            if isinstance(event, Ready):
                self.early_deaths = 0
            elif isinstance(event, Died):
                self._died(event)
            elif self.inside is not None and event.number == self.inside_number:
                if isinstance(event, Answered):
                    self.inside.answer(self.number, event.value)
                elif isinstance(event, Failed):
                    self.inside.fail(self.number, event.reason)
                self.inside = None

    def _died(self, event: Died) -> None:
        self.died_of = event.reason
        self.give_up(f"its process has ended: {event.reason}")
        self._start_later()

    def give_up(self, reason: str) -> None:
        """Tells all questions that this member will not answer them."""
        for question in (*((self.inside,) if self.inside is not None else ()), *self.waiting):
            question.fail(self.number, reason)
        self.inside = None
        self.waiting.clear()

    def _start_later(self) -> None:
        """At once after the first death in a row, and after ever longer pauses if it dies before it is ready."""
        self.early_deaths += 1
        pause_s = 0.0 if self.early_deaths == 1 else _FIRST_PAUSE_S * 2 ** min(self.early_deaths - 2, 10)
        self.start_at = time.monotonic() + min(pause_s, _LONGEST_PAUSE_S)

    def take(self, question: Question) -> None:
        """Has the question wait for the process, unless that is not there."""
        if not self.process.ready:
            question.fail(self.number, f"it is being started again, its process has ended: {self.died_of}")
            return
        for _ in range(next_open(self.waiting)):
            self.waiting.popleft()
        self.waiting.append(question)

    def work(self) -> None:
        """Starts a process again that has died, and asks one that is free."""
        if not self.process.alive and not self.pause_s:
            try:
                self.process.start_again()
            except (OSError, ReplicaDied) as error:  # no memory or no processes left, for now
                self.died_of = f"it could not be started again ({getattr(error, 'strerror', error)})"
                self._start_later()
        while self.process.free and self.process.ready and self.waiting:
            question = self.waiting.popleft()
            if question.closed:
                continue
            try:
                self.inside_number = self.process.ask(*question.args, **question.kwargs)
                self.inside = question
            except Exception as error:  # a value that cannot go to another process
                question.fail(self.number, in_a_sentence(error))


def _factory(member: Callable[..., Any], device: MemberDevice) -> Callable[[], Callable[..., Any]]:
    def make() -> Callable[..., Any]:
        if isinstance(member, nn.Module) and device.torch_device is not None:
            return _OnDevice(member, device.torch_device)
        return member

    return make


class _OnDevice:
    """A model on another device than its questions and answers."""

    def __init__(self, model: nn.Module, device: Any) -> None:
        self._model, self._device = model.to(device).eval(), device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch import Tensor

        from paceline.torch_private import tree_map_only

        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(self._device), (args, kwargs))
        return self._model(*args, **kwargs)
