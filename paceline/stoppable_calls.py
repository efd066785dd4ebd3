"""Calls of a model in this process that are given up at their deadline.

    caller   ── start ─────────── wait ──────▶ DeadlineExceeded          next call ── waits until that has ended ──▶
    thread        └─ operator ─ operator ─ opera|tor ─ stopped before the next one

A computation that runs cannot be interrupted, but whoever waits for it can stop waiting: so with a deadline the model
runs in a thread. When it is late the caller goes on at once, and the thread is stopped before its next operator of
torch. What it would have answered is thrown away with it. The next call waits for that.
Where exactly a call may be stopped it says itself: it is given a context manager to enter around what it computes.

Without a deadline nothing of this happens, and the call is a plain one.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paceline.deadlines import CallLimit, forget_deadline, shortest
from paceline.errors import DeadlineExceeded
from paceline.torch_private import is_compiled

Returned = TypeVar("Returned")
Stoppable = Callable[[AbstractContextManager[Any]], Returned]
_LONGEST_LOOK_S = 0.05  # Ctrl-C is heard between two of them


class CallGivenUp(BaseException):
    """Is raised inside a call whose caller has left. A model's own `except Exception` does not catch it."""


class StoppableCalls:
    """Makes calls of one model; each ends, or is given up at its deadline."""

    def __init__(self) -> None:
        self._given_up: list[_ThreadedCall[Any]] = []  # that may still run

    def run(
        self, who: str | Callable[[], str], call: Stoppable[Returned], give_up: Callable[[], None] | None = None
    ) -> Returned:
        """Returns `call(stopping)`, which enters `stopping` where it may be stopped. `who` is named when it is late;
        `give_up` then makes its waits for others end."""
        limit_s = shortest()
        if limit_s is None:
            self.settle()
            return call(contextlib.nullcontext())
        until = time.monotonic() + limit_s
        if not self.settle(until):
            raise DeadlineExceeded("the call before this one", limit_s, time.monotonic() - until)
        threaded = _ThreadedCall(call)
        in_time, named = False, ""
        try:
            in_time = threaded.wait(until)
        finally:  # also when Ctrl-C has ended the wait
            if not in_time:
                named = who if isinstance(who, str) else who()
                threaded.stop = True
                self._given_up.append(threaded)
                if give_up is not None:
                    give_up()
        if not in_time:
            raise DeadlineExceeded(named, limit_s, time.monotonic() - until)
        return threaded.result()

    def settle(self, until: float | None = None) -> bool:
        """Returns when nothing is left of calls that were given up; False if something still is by then."""
        while self._given_up:
            if not self._given_up[0].wait(until):
                return False
            del self._given_up[0]
        return True


class _ThreadedCall(Generic[Returned]):
    """A call in a thread of its own, with the caller's autocast and context variables."""

    def __init__(self, call: Stoppable[Returned]) -> None:
        self.stop = False
        self._returned: Returned | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        around = _autocast_here()
        context = contextvars.copy_context()
        context.run(forget_deadline)  # it is this call's, not that of those inside it
        thread = threading.Thread(target=context.run, args=(self._run, call, around), daemon=True)
        thread.start()

    def _run(self, call: Stoppable[Returned], around: list[torch.autocast]) -> None:
        try:
            with contextlib.ExitStack() as inside:
                for autocast in around:
                    inside.enter_context(autocast)
                self._returned = call(StopBetweenOperators(lambda: self.stop))
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self, until: float | None) -> bool:
        """Returns whether it has ended, by then or at last."""
        while not self._done.is_set():
            left_s = _LONGEST_LOOK_S if until is None else min(_LONGEST_LOOK_S, until - time.monotonic())
            if left_s <= 0:
                return False
            self._done.wait(left_s)
        return True

    def result(self) -> Returned:
        if self._error is not None:
            raise self._error
        return self._returned  # type: ignore[return-value]


class StopBetweenOperators(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Looks before every operator of torch whether the caller has left, and raises if it has."""

    def __init__(self, has_left: Callable[[], bool]) -> None:
        super().__init__()
        self._has_left = has_left

    def __enter__(self) -> Any:
        if self._has_left():
            raise CallGivenUp
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._has_left():
            raise CallGivenUp
        return function(*args, **(kwargs or {}))


def around(model: nn.Module, stopping: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Returns what to enter around a call of this model. One that is compiled has no operators to stop before."""
    with stopping:  # raises if its caller has left
        return contextlib.nullcontext() if is_compiled(model) else stopping


def in_time(model: nn.Module, limit: CallLimit | None) -> AbstractContextManager[Any]:
    """Returns what to enter around a training step's computing, in the caller's own thread: `CallGivenUp` is raised
    before the first operator of forward that is late. Backward runs on: what it does is known before its end only to
    itself."""
    return contextlib.nullcontext() if limit is None else around(model, StopBetweenOperators(limit.is_late))


def check_in_time(limit: CallLimit | None) -> None:
    """Raises if the time is over: the last look before something is changed."""
    if limit is not None and limit.is_late():
        raise CallGivenUp


def _autocast_here() -> list[torch.autocast]:
    """Returns what the caller's thread has switched on, for a thread that has nothing of it."""
    return [
        torch.autocast(device, torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]
