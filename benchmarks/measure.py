"""Rounds, medians and ratios.

Contestants take turns, A B C A B C …, so that whatever changes slowly on the machine changes for all of them. A ratio
is formed within each round and the median of those is the figure: a round in which the machine was busy spoils both
sides of its ratio, and not the other rounds'. The lowest and the highest round are its spread.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

T = TypeVar("T")


class Skipped(Exception):
    """This benchmark cannot run here; the message says why."""


@dataclass(frozen=True)
class Setting:
    """How to run a benchmark. `scale` is "full", "quick" (same contestants, small) or "tiny" (for the tests)."""

    scale: str
    rounds: int
    say: Callable[[str], None]


class Series(msgspec.Struct, frozen=True):
    """What one contestant achieved, a figure a round."""

    name: str
    unit: str
    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A ratio, a figure a round, and the bar it is held against. Without a bar it is for information."""

    text: str
    rounds: tuple[float, ...]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def bar(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:.2f}×"
        return f"≤ {self.at_most:.2f}×" if self.at_most is not None else ""

    @property
    def reached(self) -> bool | None:
        """Whether the median is on the right side of the bar; None if there is no bar."""
        if self.at_least is not None:
            return self.median >= self.at_least
        return self.median <= self.at_most if self.at_most is not None else None

    @property
    def figure(self) -> str:
        return f"{self.median:.2f}× ({min(self.rounds):.2f} – {max(self.rounds):.2f})"


class Curve(msgspec.Struct, frozen=True):
    """A line of a plot."""

    name: str
    points: tuple[tuple[float, float], ...]


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """How something changes with something else; what the axes are."""

    x: str
    y: str
    curves: tuple[Curve, ...]
    log: bool = False  # both axes


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one benchmark found."""

    title: str
    series: tuple[Series, ...]
    claims: tuple[Claim, ...]
    notes: tuple[str, ...] = ()
    plot: Plot | None = None
    measured: str = msgspec.field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M"))


def take_turns(
    contestants: Mapping[str, Callable[[], T]], setting: Setting, show: Callable[[T], str]
) -> dict[str, list[T]]:
    """Run every contestant once a round. Returns what each gave, by name."""
    given: dict[str, list[T]] = {name: [] for name in contestants}
    for number in range(setting.rounds):
        for name, run in contestants.items():
            given[name].append(run())
            setting.say(f"round {number + 1}/{setting.rounds}  {name}: {show(given[name][-1])}")
    return given


def time_in_turns(contestants: Mapping[str, Callable[[], float]], setting: Setting, unit: str) -> dict[str, Series]:
    """The same for contestants that give one figure each."""
    given = take_turns(contestants, setting, lambda figure: f"{figure:.4g} {unit}")
    return {name: Series(name, unit, tuple(figures)) for name, figures in given.items()}


def per_round(over: Series, under: Series, times: float = 1.0) -> tuple[float, ...]:
    """`over` divided by `under` in each round."""
    return tuple(times * a / b for a, b in zip(over.rounds, under.rounds, strict=True))


def fastest(contestants: Sequence[Series]) -> Series:
    """The one with the lowest median time: of several ways to use a peer, the one it is judged by."""
    return min(contestants, key=lambda series: series.median)


def median_step_s(marks: Sequence[float], warm_up: int) -> float:
    """The median time from one step's end to the next, of the steps after `warm_up`."""
    after = marks[warm_up - 1 :]
    return statistics.median(b - a for a, b in itertools.pairwise(after))


def median_exchange_s(ranks: Sequence[Sequence[tuple[float, float]]], warm_up: int) -> float:
    """By rank and repetition, when it was ready and when it was done: the median time of an exchange.

    An exchange lasts from the moment the last rank is ready until all are done. So waiting for a rank that
    computes longer is not counted as exchanging.
    """
    lasted: list[float] = []
    for pairs in list(zip(*ranks, strict=True))[warm_up:]:
        lasted.append(max(done for _, done in pairs) - max(ready for ready, _ in pairs))
    return statistics.median(lasted)


def steps_per_second(replicas: Sequence[Sequence[float]], warm_up: int) -> float:
    """When each step of each replica ended: the steps of all of them together in a second.

    Counted from when all are at it and have made `warm_up` steps each on average, until the first of them has no more
    to make.
    """
    everything = sorted(mark for marks in replicas for mark in marks)
    begin = max(everything[warm_up * len(replicas) - 1], *(marks[0] for marks in replicas))
    end = min(marks[-1] for marks in replicas)
    if end <= begin:  # so few steps that one replica had made all of its own before the others began
        begin, end = everything[0], everything[-1]
    return sum(begin < mark <= end for mark in everything) / (end - begin)
