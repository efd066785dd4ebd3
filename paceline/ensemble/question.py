"""One question to all members of an ensemble: who has answered so far, and whether it is still open.

A question is an object that members are handed and answer to. Whoever asked it closes it at the deadline; what comes
after that is dropped here. So a late answer cannot be taken for that to a later question: it has nowhere to go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

CLOSED = "the ensemble was closed"  # why a member does not answer
_LONGEST_LOOK_S = 0.05  # Ctrl-C is heard between two of them


class Question:
    """What is asked, and the answers by member; members are numbers here."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], members: int) -> None:
        self.args, self.kwargs = args, kwargs
        self.answers: dict[int, Any] = {}
        self.failures: dict[int, str] = {}  # why there will be no answer
        self.closed = False
        self._members = members
        self._changed = threading.Condition()

    def answer(self, member: int, value: Any) -> None:
        """Takes a member's answer, if it is in time."""
        with self._changed:
            if not self.closed and member not in self.failures:
                self.answers[member] = value
                self._changed.notify()

    def fail(self, member: int, reason: str) -> None:
        """Notes that this member will not answer."""
        with self._changed:
            if not self.closed and member not in self.answers:
                self.failures[member] = reason
                self._changed.notify()

    def wait(self, until: float | None) -> None:
        """Returns when every member has answered or failed, or when it is time, and closes the question."""
        try:
            with self._changed:
                while len(self.answers) + len(self.failures) < self._members:
                    left_s = _LONGEST_LOOK_S if until is None else min(_LONGEST_LOOK_S, until - time.monotonic())
                    if left_s <= 0:
                        break
                    self._changed.wait(left_s)
        finally:
            with self._changed:
                self.closed = True


class AskedMembers(Protocol):
    """Where the members of an ensemble are: who is handed questions, and answers to them whenever that is."""

    def ask(self, question: Question) -> None:
        """Hands the question to every member, and returns at once."""

    def close(self) -> None:
        """Ends the members."""


def next_open(waiting: Sequence[Question]) -> int:
    """Returns how many questions at the front nobody waits for any more.

    >>> questions = [Question((), {}, 1) for _ in range(3)]
    >>> questions[0].closed = True
    >>> next_open(questions)
    1
    """
    return next((at for at, question in enumerate(waiting) if not question.closed), len(waiting))
