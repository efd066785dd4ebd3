"""Means and spreads over repeats, and whether two ways differ by more than that.

All ways have the same seeds, so repeats are compared seed by seed: what a seed does to both is no difference between
them. The interval is Student's, 95 %. Two ways differ if it does not reach 0, are the same if it stays within a margin
of 0 that nobody would mind, and anything else is too close to say.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # by degrees of freedom, from 1

ROUNDING = 1e-7  # of a mean: what summing in another order makes of one and the same

Verdict = Literal["less", "more", "same", "too close"]


@dataclass(frozen=True)
class OverRepeats:
    """Of some numbers: their mean, and by how much they vary.

    >>> str(OverRepeats.of([1.0, 2.0, 3.0])), str(OverRepeats.of([2.0])), OverRepeats.of([])
    ('2 ± 1', '2', None)
    """

    mean: float
    deviation: float | None  # None: there is only one

    @classmethod
    def of(cls, values: Sequence[float]) -> OverRepeats | None:
        if not values:
            return None
        mean, deviation = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
        if deviation is not None and deviation < ROUNDING * abs(mean):
            deviation = 0.0
        return cls(mean, deviation)

    def __str__(self) -> str:
        return f"{self.mean:.3g}" if self.deviation is None else f"{self.mean:.3g} ± {self.deviation:.2g}"


def quantile(degrees: int) -> float:
    """Student's t at 97.5 %.

    >>> round(quantile(2), 2), round(quantile(10), 2), round(quantile(1000), 2)
    (4.3, 2.23, 1.96)
    """
    if degrees <= len(_QUANTILES):
        return _QUANTILES[degrees - 1]
    return 1.96 + 2.373 / degrees + 2.8 / degrees**2


@dataclass(frozen=True)
class MeasuredDifference:
    """Of one way to another: the mean over common repeats, and how far it may be off."""

    verdict: Verdict
    mean: float
    half: float | None  # of the interval; None: one repeat says nothing about it
    repeats: int


def difference(one: Mapping[int, float], other: Mapping[int, float], margin: float) -> MeasuredDifference | None:
    """How `one` differs from `other`, both by repeat; None if they have no repeat in common.

    >>> difference({0: 1.0, 1: 1.1, 2: 0.9}, {0: 2.0, 1: 2.1, 2: 1.9}, margin=0.05).verdict
    'less'
    >>> difference({0: 1.0, 1: 3.0}, {0: 2.0, 1: 2.1}, margin=0.05).verdict
    'too close'
    """
    common = sorted(one.keys() & other.keys())
    if not common:
        return None
    gaps = [one[repeat] - other[repeat] for repeat in common]
    mean = statistics.fmean(gaps)
    if len(gaps) == 1:
        return MeasuredDifference("too close", mean, None, 1)
    half = quantile(len(gaps) - 1) * statistics.stdev(gaps) / math.sqrt(len(gaps))
    verdict: Verdict = "too close"
    if abs(mean) + half <= margin:
        verdict = "same"
    elif abs(mean) > half:
        verdict = "less" if mean < 0 else "more"
    return MeasuredDifference(verdict, mean, half, len(gaps))


def ratio(one: Mapping[int, float], other: Mapping[int, float], margin: float = 0.05) -> MeasuredDifference | None:
    """How many times as much: the same on a scale of ratios, whose mean is the ratio itself.

    >>> round(ratio({0: 1.0, 1: 1.1}, {0: 2.0, 1: 2.2}).mean, 6)
    0.5
    """
    logs = [{repeat: math.log(value) for repeat, value in values.items() if value > 0} for values in (one, other)]
    found = difference(logs[0], logs[1], math.log1p(margin))
    if found is None:
        return None
    return MeasuredDifference(found.verdict, math.exp(found.mean), found.half, found.repeats)
