"""Work of a backward that nobody waits for: a device does it while it would wait for another.

Of what a cut model's backward computes, other devices need the gradients of what they have handed on. Gradients of
weights they do not: those are made later, oldest first, whenever there is nothing to receive (`Peers.meanwhile`), and
what is left of them at the end of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

Work = Callable[[], None]


class Postponed:
    """What waits, of one device."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Work]] = deque()  # each with the number of its backward
        self._backwards = 0

    @contextmanager
    def backward(self, most_backwards: int | None = None) -> Iterator[None]:
        """Around a backward, of which work may wait; at its end that of the last `most_backwards` still does: it holds
        memory."""
        token = _postponed.set(self)
        try:
            yield
        finally:
            _postponed.reset(token)
        self._backwards += 1
        while most_backwards is not None and self._waiting and self._waiting[0][0] < self._backwards - most_backwards:
            self.do_one()

    def add(self, work: Work) -> None:
        self._waiting.append((self._backwards, work))

    def do_one(self) -> bool:
        """Do what has waited longest; returns whether there was something."""
        if not self._waiting:
            return False
        with torch.no_grad():
            self._waiting.popleft()[1]()
        return True

    def do_all(self) -> None:
        while self.do_one():
            pass

    def forget(self) -> None:
        """Whatever still waits belongs to a step that has come to nothing."""
        self._waiting.clear()


_postponed: ContextVar[Postponed | None] = ContextVar("postponed", default=None)


def later_or_now(work: Work) -> None:
    """Have it done: later, inside of a backward of which work may wait, and else at once."""
    postponed = _postponed.get()
    if postponed is None:
        work()
    else:
        postponed.add(work)
