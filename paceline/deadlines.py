"""`pl.deadline`: how long any one call of a Trainer, a Predictor or an Ensemble may take.

    with pl.deadline(1.0):
        scores = predictor(image)  # within a second, or pl.DeadlineExceeded

There are two levels: a call may have a limit of its own (`ensemble(x, timeout_s=0.3)`), and everything inside
`pl.deadline` has one. Of several limits the shortest holds. The limit is each call's, not that of the block: two calls
inside `pl.deadline(1.0)` have a second each. It holds for what the thread calls that has set it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from paceline.errors import DeadlineExceeded, InvalidInput, StrategyError

_LIMIT: ContextVar[float | None] = ContextVar("paceline_deadline", default=None)


@contextmanager
def deadline(limit_s: float) -> Iterator[None]:
    """Inside, every call of a Trainer, Predictor or Ensemble has this many seconds, or raises `DeadlineExceeded`."""
    token = _LIMIT.set(shortest(check_limit("deadline", limit_s)))
    try:
        yield
    finally:
        _LIMIT.reset(token)


def shortest(own_s: float | None = None) -> float | None:
    """Returns how many seconds a call has that starts here, with `own_s` as its own limit; None: as long as it takes.

    >>> with deadline(2.0), deadline(1.0):
    ...     shortest(), shortest(0.5), shortest(3.0)
    (1.0, 0.5, 1.0)
    >>> shortest() is None
    True
    """
    around_s = _LIMIT.get()
    return min((limit_s for limit_s in (own_s, around_s) if limit_s is not None), default=None)


@dataclass(frozen=True)
class CallLimit:
    """The limit of one call that has begun."""

    limit_s: float
    until: float  # by the clock of the machine

    def is_late(self) -> bool:
        return time.monotonic() > self.until

    def exceeded(self, who: str) -> DeadlineExceeded:
        return DeadlineExceeded(who, self.limit_s, time.monotonic() - self.until)


def call_limit() -> CallLimit | None:
    """Returns the limit of a call that begins now; None: it takes as long as it takes."""
    limit_s = shortest()
    return CallLimit(limit_s, time.monotonic() + limit_s) if limit_s is not None else None


def hold_always(limit_s: float) -> None:
    """Has every call of this thread have that limit, from now on (`--operation-timeout`)."""
    _LIMIT.set(limit_s)


def forget_deadline() -> None:
    """Lifts the limit, in a context that is a copy of another."""
    _LIMIT.set(None)


def check_limit(field: str, limit_s: object) -> float:
    """Returns a limit, if it is one."""
    if isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not 0 < limit_s < math.inf:
        raise InvalidInput(field, limit_s, "give a number of seconds above 0")
    return float(limit_s)


def refuse_deadline(what: str, instead: str) -> None:
    """Raises inside `pl.deadline`, for a call that could not be given up without leaving something half done."""
    if (limit_s := _LIMIT.get()) is not None:
        raise StrategyError("deadline", limit_s, f"{what} cannot be given up halfway, {instead}")
