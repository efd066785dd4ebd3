"""What a search looks for: the metric that the script tells, and which way it is better."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.errors import LaunchError
from paceline.watch.target import is_metric, never_told


@dataclass(frozen=True)
class Goal:
    """
    >>> goal = Goal("accuracy", maximize=True)
    >>> str(goal), goal.flag, goal.is_better(0.9, 0.8)
    ('largest accuracy', '--maximize', True)
    """

    metric: str
    maximize: bool

    def __str__(self) -> str:
        return f"{'largest' if self.maximize else 'smallest'} {self.metric}"

    @property
    def direction(self) -> Literal["maximize", "minimize"]:
        return "maximize" if self.maximize else "minimize"

    @property
    def flag(self) -> str:
        return f"--{self.direction}"

    def is_better(self, one: float, other: float) -> bool:
        return one > other if self.maximize else one < other

    def order(self, value: float) -> float:
        """Smaller is better."""
        return -value if self.maximize else value

    def of(self, told: Mapping[str, dict[int, float]]) -> dict[int, float]:
        """Its values by step, of all that a run has told by name; none if it has not told it."""
        if self.metric in told:
            return told[self.metric]
        return next((values for name, values in told.items() if is_metric(self.metric, name)), {})

    def check_told(self, names: Collection[str]) -> None:
        """Refuse to go on with a script that tells these, if it is not clear which of them is the metric."""
        found = [name for name in names if is_metric(self.metric, name)]
        if not found:
            raise LaunchError(never_told(self.metric, names, f"by {self.flag}"))
        if len(found) > 1 and self.metric not in found:
            names_found = " or ".join(sorted(found))
            raise LaunchError(f"{self.metric} may be {names_found}: the script tells both, ask for one by {self.flag}")
