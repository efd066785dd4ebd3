"""How much longer or shorter than its mean a turn's computation takes, drawn at random.

A value says what is drawn: factors, one a turn, for all that a participant computes in it. What makes a replica slow (a
busy neighbour, a long sentence) holds for a while, so the layers of one turn are slow together.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.errors import InvalidInput

Factors = NDArray[np.float64]


class Fixed(msgspec.Struct, frozen=True, tag="fixed"):
    """Every turn takes the mean."""

    mean: float = 1.0

    def draw(self, random: np.random.Generator, count: int) -> Factors:
        return np.full(count, self.mean)


class Lognormal(msgspec.Struct, frozen=True, tag="lognormal"):
    """Mean 1; `spread` is the standard deviation of the logarithm, about that of the times over their mean."""

    spread: float

    def __post_init__(self) -> None:
        if not 0 <= self.spread < 5:
            raise InvalidInput("spread", self.spread, "give a number from 0 up, such as 0.1 for a tenth")

    @property
    def mean(self) -> float:
        return 1.0

    def draw(self, random: np.random.Generator, count: int) -> Factors:
        return np.asarray(random.lognormal(-(self.spread**2) / 2, self.spread, count))


class Stragglers(msgspec.Struct, frozen=True, tag="stragglers"):
    """Lognormal with mean 1; and in a `chance` of turns longer by a factor of a Pareto distribution from `least` up.

    The smaller `tail`, the heavier: the mean of the factor is least · tail / (tail - 1).
    """

    spread: float
    chance: float
    least: float = 1.5
    tail: float = 2.0

    def __post_init__(self) -> None:
        Lognormal(self.spread)
        if not 0 <= self.chance <= 1:
            raise InvalidInput("chance", self.chance, "give a share of the turns, from 0 to 1")
        if not (self.least >= 1 and self.tail > 1):
            raise InvalidInput("least, tail", (self.least, self.tail), "give at least 1, and more than 1")

    @property
    def mean(self) -> float:
        return 1 + self.chance * (self.least * self.tail / (self.tail - 1) - 1)

    def draw(self, random: np.random.Generator, count: int) -> Factors:
        factors = Lognormal(self.spread).draw(random, count)
        slow = random.random(count) < self.chance
        factors[slow] *= self.least * (1 + random.pareto(self.tail, int(slow.sum())))
        return factors


class MeasuredFactors(msgspec.Struct, frozen=True, tag="measured"):
    """Factors as they were measured: each is as likely as any other."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.factors or not all(factor >= 0 and math.isfinite(factor) for factor in self.factors):
            raise InvalidInput("factors", self.factors, "give at least one, each from 0 up")

    @property
    def mean(self) -> float:
        return float(np.mean(self.factors))

    def draw(self, random: np.random.Generator, count: int) -> Factors:
        return np.asarray(random.choice(np.asarray(self.factors), count))

    @staticmethod
    def of(seconds: Any) -> MeasuredFactors:
        """Returns what measured times of turns are as factors of their mean.

        >>> MeasuredFactors.of([1.0, 3.0])
        MeasuredFactors(factors=(0.5, 1.5))
        """
        times = np.asarray(seconds, dtype=float)
        return MeasuredFactors(tuple((times / times.mean()).tolist()))


ComputeTimes = Fixed | Lognormal | Stragglers | MeasuredFactors
