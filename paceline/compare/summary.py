"""The measurements of each way, put together: what the table, the answers and the JSON are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.compare.measuring import Measurement
from paceline.compare.spread import OverRepeats
from paceline.compare.ways import Way


@dataclass(frozen=True)
class WaySummary:
    """One way over its repeats. Times, updates and samples are of those repeats that reached the target."""

    way: Way
    measurements: tuple[Measurement, ...]

    @property
    def done(self) -> list[Measurement]:
        """Those that ran to their end."""
        return [one for one in self.measurements if one.error is None]

    @property
    def reached(self) -> list[Measurement]:
        return [one for one in self.done if one.reached]

    @property
    def failed(self) -> Measurement | None:
        return next((one for one in self.measurements if one.error is not None), None)

    @property
    def reaches(self) -> bool:
        """Whether every repeat has reached the target."""
        return bool(self.done) and len(self.reached) == len(self.done)

    def over(self, field: str) -> OverRepeats | None:
        """The mean and the spread of a field of the measurements."""
        return OverRepeats.of(list(self.by_repeat(field).values()))

    def by_repeat(self, field: str) -> dict[int, float]:
        """A field by repeat, where it is known."""
        only_reached = field in ("seconds", "wall_seconds", "updates", "samples")
        chosen = self.reached if only_reached else self.done
        return {one.repeat: value for one in chosen if (value := getattr(one, field)) is not None}


def summarize(ways: Sequence[Way], measurements: Sequence[Measurement]) -> list[WaySummary]:
    """Those ways of which something was measured, in the order in which they were asked for."""
    by_way = {way: tuple(one for one in measurements if one.way == way.name) for way in ways}
    return [WaySummary(way, found) for way, found in by_way.items() if found]
