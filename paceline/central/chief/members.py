"""Who takes part in a training, where each is in the script, and how far each has come in an async run."""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import PacelineError

ScriptPlace = tuple[int, int]  # chapter, and the epoch that the script stops at


class ReplicaMembers:
    """The replicas of a run."""

    def __init__(self, replicas: int) -> None:
        self.present: dict[int, int] = dict.fromkeys(range(replicas), 0)  # incarnations; 0: expected, not yet seen
        self.places: dict[int, ScriptPlace] = {}  # that each asked for last
        self._newest: dict[int, int] = {}  # incarnations
        self._reports: dict[int, int] = {}  # of async tickets, by replica

    def check(self, replica: int) -> None:
        if replica not in self.present:
            # A ticket that it got now would never return.
            raise PacelineError(f"replica {replica} was taken off the list: it has to join before it takes part")

    def newest(self, replica: int) -> int:
        return self._newest.get(replica, 0)

    def join(self, replica: int, incarnation: int) -> None:
        if incarnation < self.newest(replica):
            raise PacelineError(f"replica {replica} was started again since: this process no longer takes part")
        self._newest[replica] = self.present[replica] = incarnation
        # Who joins late is as far as the slowest: it must not hold up those who are bounded by it.
        others = [self._reports.get(member, 0) for member in self.present if member != replica]
        self._reports[replica] = max(self._reports.get(replica, 0), min(others, default=0))

    def leave(self, replica: int, incarnation: int | None) -> bool:
        """Take it off the list, unless another process is in its place; return whether it was there."""
        if incarnation is not None and self.present.get(replica, incarnation) not in (0, incarnation):
            return False
        self.places.pop(replica, None)  # the next process in that place may be elsewhere
        return self.present.pop(replica, None) is not None

    # ── where they are ───────────────────────────────────────────────────────────────────────────────────

    def can_help(self, chapter: int, epoch: int, finished: Callable[[ScriptPlace], bool]) -> list[int]:
        """Return the members that are not known to be at a place of the script where they cannot work on that epoch."""
        found = []
        for member in self.present:
            place = self.places.get(member, (chapter, epoch + 1))
            there = chapter >= place[0] if finished(place) else chapter == place[0] and epoch < place[1]
            if there:
                found.append(member)
        return found

    def any_before(self, chapter: int, finished: Callable[[ScriptPlace], bool]) -> bool:
        """Return whether a member has work to do in an earlier chapter."""
        places = [self.places[member] for member in self.present if member in self.places]
        return any(place[0] < chapter and not finished(place) for place in places)

    # ── how far they are ─────────────────────────────────────────────────────────────────────────────────

    def has_reported(self, replica: int) -> None:
        self._reports[replica] = self._reports.get(replica, 0) + 1

    def forget_reports(self) -> None:
        """Count from 0 again: a bound is on what comes now."""
        self._reports.clear()

    def behind(self, replica: int) -> tuple[int, int]:
        """Return the slowest member, and how many tickets it is behind that replica."""
        slowest = min(self.present, key=lambda member: self._reports.get(member, 0))
        return slowest, self._reports.get(replica, 0) - self._reports.get(slowest, 0)
