"""What comes out of a simulated run: seconds, what bound, what was thrown away, how stale gradients were."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from paceline.errors import InvalidInput


class ResourceUse(msgspec.Struct, frozen=True):
    """What all resources of one name did."""

    name: str
    busy: float  # share of the time, on average over all of that name
    busiest: float  # of the one that did most
    bytes_a_step: float  # through one of them
    on_path: float  # share of a step that it took on the critical path: waiting for it, and its work


class Staleness(msgspec.Struct, frozen=True):
    """By how many updates parameters had changed since they were pulled."""

    mean: float
    median: float
    high: float  # of one in twenty turns it is more
    most: int
    turns: dict[int, int]  # how many turns there were of each staleness

    @staticmethod
    def of(turns: Mapping[int, int]) -> Staleness:
        """
        >>> Staleness.of({0: 1, 2: 1}).mean
        1.0
        """
        values = np.repeat(list(turns), list(turns.values()))
        median, high = np.quantile(values, (0.5, 0.95)).tolist()
        return Staleness(float(values.mean()), median, high, int(values.max()), dict(sorted(turns.items())))


class Simulated(msgspec.Struct, frozen=True):
    """What came out. A step is an update of the parameters; of async, one turn's."""

    strategy: str
    steps: int  # that were measured, after the first few
    seconds: float  # they took
    step_s: float  # mean
    low_s: float  # one step in twenty is shorter; async: of as many steps as there are participants, each
    median_s: float
    high_s: float  # one in twenty is longer
    error_s: float  # standard error of the mean
    turns_per_s: float  # that counted, of all participants
    late: float  # share of turns that were thrown away
    path: dict[
        str, float
    ]  # shares of a step on the critical path, by kind; wait: what the slowest took beyond the mean
    binds: str  # the resource that took most of it
    resources: tuple[ResourceUse, ...]
    staleness: Staleness | None  # with async
    events: int

    def use(self, name: str) -> ResourceUse:
        """Returns what the resources of this name did."""
        for use in self.resources:
            if use.name == name:
                return use
        raise InvalidInput("resource", name, f"one of {', '.join(use.name for use in self.resources)}")
