"""Deaths and restarts of one run: how many there were, how many there may be, and how long the next one waits.

Whoever dies right after its start would do so again: each quick death in a row doubles the delay.
"""

from __future__ import annotations

from paceline.launch.job import RunJob

QUICK_DEATH_S = 1.0  # whoever dies this soon is started again with a delay
MOST_DELAY_S = 30.0


class Restarts:
    """Counts both."""

    def __init__(self, job: RunJob) -> None:
        self._job = job
        self.deaths = self.made = 0
        self._quick_deaths: dict[int, int] = {}

    @property
    def left(self) -> bool:
        return self.made < self._job.max_restarts

    @property
    def of_replicas(self) -> bool:
        """Whether a replica that dies now is started again."""
        return self._job.on_failure == "restart" and self.left

    @property
    def used_up(self) -> str:
        """What a sentence says in front when there are none any more."""
        return "all restarts are used up, " if self._job.on_failure == "restart" else ""

    def count(self) -> str:
        """One more, in words."""
        self.made += 1
        return f"({self.made} of at most {self._job.max_restarts} times)"

    def delay_s(self, row: int, lived_s: float) -> float:
        """How long to wait before this row is started again."""
        quick = lived_s < QUICK_DEATH_S
        self._quick_deaths[row] = self._quick_deaths.get(row, 0) + 1 if quick else 0
        return float(min(MOST_DELAY_S, 2.0 ** (self._quick_deaths[row] - 2))) if quick else 0.0
