"""How long replicas take for their samples, and for how many of them a step should wait (`--accept auto`)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from paceline.central.chief.tickets import OpenTicket

RECENT = 16  # durations of a replica that are looked at
ENOUGH = 3  # so many of each there must be
CHOOSE_EVERY = 5  # steps between two choices
CHOOSE_GAIN = 1.05  # another number of accepted replicas must gain this much


class Pace:
    """What was measured of every replica."""

    def __init__(self) -> None:
        self.chosen: int | None = None
        self._durations: dict[int, deque[float]] = {}  # seconds a sample
        self._overdue: dict[int, OpenTicket] = {}  # by replica: its late ticket, which it has yet to report

    def took(self, ticket: OpenTicket, now: float) -> None:
        """A ticket was reported."""
        recent = self._durations.setdefault(ticket.replica, deque(maxlen=RECENT))
        recent.append(_seconds_a_sample(ticket, now))

    def is_late(self, ticket: OpenTicket) -> None:
        """A step was closed without a ticket that its replica is still at."""
        self._overdue[ticket.replica] = ticket

    def is_back(self, replica: int, now: float) -> None:
        """A replica is not at a late ticket any more: it has reported it, or given it up, after as long or longer."""
        overdue = self._overdue.pop(replica, None)
        if overdue is not None:
            self.took(overdue, now)

    def late_ticket(self, replica: int) -> int | None:
        overdue = self._overdue.get(replica)
        return overdue.work.ticket if overdue is not None else None

    def leave(self, replica: int) -> None:
        self._overdue.pop(replica, None)
        self._durations.pop(replica, None)

    # ── the choice ───────────────────────────────────────────────────────────────────────────────────────

    def choose(self, among: Sequence[int], step: int, now: float) -> int:
        """Return for how many of these a step should wait."""
        if self.chosen is None or step % CHOOSE_EVERY == 0:
            self.chosen = self._best(among, now)
        return min(self.chosen, len(among))

    def _best(self, among: Sequence[int], now: float) -> int:
        """The number that should give the most samples a second, from how long each replica took for a sample.

        With k accepted, each has 1/k of the batch, and the k-th fastest closes the step. Which one that is may change
        from step to step, so the last durations of all are laid side by side, and the k-th fastest is found in each
        row: one replica that is always slow shows in this as much as many that are slow now and then. What a replica
        takes for a ticket, however small, counts as taken for its samples, which speaks for waiting for more of them.
        """
        count = len(among)
        current = min(self.chosen or count, count)
        columns = [self._recent(member, now) for member in among]
        rows = min(map(len, columns))
        if rows < ENOUGH:
            return current
        ordered = [sorted(column[-row] for column in columns) for row in range(1, rows + 1)]
        cost = {k: math.fsum(row[k - 1] for row in ordered) / k for k in range(1, count + 1)}
        best = min(cost, key=lambda k: (cost[k], -k))
        return best if cost[best] * CHOOSE_GAIN < cost[current] else current

    def _recent(self, replica: int, now: float) -> list[float]:
        recent = list(self._durations.get(replica, ()))
        overdue = self._overdue.get(replica)
        if overdue is None:
            return recent
        # It is at a late ticket still, and may hang: it must not be counted on because it was quick before.
        at_least = _seconds_a_sample(overdue, now)
        return [max(at_least, duration) for duration in recent]


def _seconds_a_sample(ticket: OpenTicket, now: float) -> float:
    return max(0.0, now - ticket.handed_at) / ticket.samples
