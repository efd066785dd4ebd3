"""Who is there: a replica whose last connection has ended, and that does not come back, is off the chief's list."""

from __future__ import annotations

import time
from collections import Counter

from paceline.central.container.bounds import check_place
from paceline.central.container.chief_state import ChiefState

GRACE_S = 1.0  # for a replica whose connection broke to come back
BACK_WITHIN_S = 10.0  # for all of them, when it is this server that was gone


class Presence:
    """Counts the connections of a container's replicas."""

    def __init__(self, state: ChiefState) -> None:
        self._state = state
        self._changed = state.changed  # guards all below
        self._connections: Counter[tuple[int, int]] = Counter()  # how many each replica has, by incarnation
        self._missing: dict[int, tuple[int, float]] = {}  # by replica: its incarnation, and when it leaves
        self.left_at = time.monotonic()  # when somebody was last taken off the list

    @property
    def members(self) -> list[int]:
        """Return the replicas that are there: have come, and not left."""
        with self._changed:
            return [replica for replica, incarnation in sorted(self._state.chief.members.items()) if incarnation]

    def expects(self, replica: int, incarnation: int | None) -> bool:
        """Return whether that replica is on the list: not yet seen, or with that process (None: with any)."""
        with self._changed:
            there = self._state.chief.members.get(replica)
        return there is not None and (incarnation is None or there in (0, incarnation))

    @property
    def certain(self) -> bool:
        """Return whether it is known of every member that it is there: nobody's last connection has just ended."""
        with self._changed:
            return not self._missing

    def join(self, replica: int, incarnation: int) -> None:
        with self._changed:
            check_place(replica, self._state.settings.replicas)
            self._state.chief.join(replica, incarnation)
            self._state.note_members()
            self._connections[replica, incarnation] += 1
            self._missing.pop(replica, None)
            self._changed.notify_all()

    def check(self, replica: int, incarnation: int) -> None:
        """Refuse a process that another has followed; one that was gone for too long, and is back, joins again."""
        check_place(replica, self._state.settings.replicas)
        if not self._state.chief.is_member(replica, incarnation):
            self._state.chief.join(replica, incarnation)
            self._state.note_members()

    def lost(self, replica: int, incarnation: int, *, at_once: bool) -> None:
        """A connection of that replica has ended; without another it has left soon, or `at_once`."""
        with self._changed:
            if not self._connections[replica, incarnation]:
                return  # of a run before this one
            self._connections[replica, incarnation] -= 1
            if not self._connections[replica, incarnation] and self._state.chief.is_member(replica, incarnation):
                self._missing[replica] = (incarnation, time.monotonic() + (0.0 if at_once else GRACE_S))

    def expect_all_back(self) -> None:
        """This process follows one that has died: all members will connect again, or have left."""
        with self._changed:
            until = time.monotonic() + BACK_WITHIN_S
            self._missing = {replica: (held, until) for replica, held in self._state.chief.members.items()}

    def overdue(self) -> list[tuple[int, int]]:
        """Return replicas, and their incarnations, that have not come back in time."""
        now = time.monotonic()
        with self._changed:
            return [(replica, held) for replica, (held, until) in self._missing.items() if now >= until]

    def leave(self, replica: int, incarnation: int) -> None:
        with self._changed:
            self._state.chief.leave(replica, incarnation or None)
            self.left_at = time.monotonic()
            self._state.note_members()
            self._missing.pop(replica, None)
            self._changed.notify_all()
