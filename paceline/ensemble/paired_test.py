"""Whether one model is better than another on the same samples, or whether that may be chance.

Both have answered the same samples, so they are compared sample by sample: what is hard for both says nothing about
their difference. Where each sample is right or wrong, McNemar's exact test counts only those where they differ: if none
were better, each of these would be a toss of a coin. Of any other number, samples are drawn again and again with
replacement, and the difference of the means is looked at in each draw (the paired bootstrap).

    yes            better, and by more than chance would do in one of twenty such comparisons
    no             worse, by as much
    too close to say
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from paceline.loop.validation import SampleMetric, mean_of

LEVEL = 0.05
_DRAWS = 10_000
_MOST_WORK = 300_000_000  # samples that are drawn altogether
_AT_ONCE = 1_000_000  # of them

PairedVerdict = Literal["yes", "no", "too close to say"]


class PairedResult(msgspec.Struct, frozen=True):
    """How much better one is than the other, and how likely chance would make it so."""

    verdict: PairedVerdict
    difference: float  # of the metric, above 0: better
    p_value: float
    test: Literal["McNemar", "bootstrap"]
    better_on: int  # samples
    worse_on: int


def compare_pairs(one: Sequence[SampleMetric], other: Sequence[SampleMetric], *, maximize: bool = True) -> PairedResult:
    """Returns whether `one` is better than `other`: the metric of each, sample by sample.

    >>> right, wrong = (1.0, 1.0), (0.0, 1.0)
    >>> compare_pairs([right] * 9 + [wrong], [wrong] * 9 + [wrong]).verdict
    'yes'
    >>> compare_pairs([right] * 3 + [wrong] * 2, [wrong] * 2 + [right] * 3).verdict
    'too close to say'
    """
    sign = 1.0 if maximize else -1.0
    difference = sign * (mean_of(one) - mean_of(other))
    gaps = [sign * (a[0] - b[0]) for a, b in zip(one, other, strict=True)]
    better, worse = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    test: Literal["McNemar", "bootstrap"]
    if {value for value, _ in (*one, *other)} <= {0.0, 1.0} and {count for _, count in (*one, *other)} == {1.0}:
        test, p_value = "McNemar", mcnemar(better, worse)
    else:
        test, p_value = "bootstrap", paired_bootstrap(one, other)
    verdict: PairedVerdict = "too close to say"
    if p_value < LEVEL and difference:
        verdict = "yes" if difference > 0 else "no"
    return PairedResult(verdict, difference, p_value, test, better, worse)


def mcnemar(better: int, worse: int) -> float:
    """Returns how likely a fair coin falls at least this unevenly, on either side.

    >>> mcnemar(0, 0), mcnemar(5, 0), round(mcnemar(8, 2), 6)
    (1.0, 0.0625, 0.109375)
    """
    tosses = better + worse
    tail = sum(math.comb(tosses, few) for few in range(min(better, worse) + 1))
    return min(1.0, float(2 * tail / 2**tosses)) if tosses < 1000 else _mcnemar_of_many(better, worse)


def _mcnemar_of_many(better: int, worse: int) -> float:
    """Returns the same of so many tosses that they are a bell curve, with the usual correction."""
    distance = max(0.0, abs(better - worse) - 1) / math.sqrt(better + worse)
    return math.erfc(distance / math.sqrt(2))


def paired_bootstrap(one: Sequence[SampleMetric], other: Sequence[SampleMetric]) -> float:
    """Returns twice the share of draws in which the difference is not on the side on which it is: how likely it is
    chance. Draws are the same every time.

    >>> low, high = [(float(i % 7), 1.0) for i in range(50)], [(i % 7 + 0.1, 1.0) for i in range(50)]
    >>> paired_bootstrap(high, low) < 0.001, paired_bootstrap(low, low)
    (True, 1.0)
    """
    size, found = len(one), mean_of(one) - mean_of(other)
    if found == 0 or size < 2:
        return 1.0
    draws = max(200, min(_DRAWS, _MOST_WORK // size))
    at_once = max(1, _AT_ONCE // size)
    values = np.array([[*a, *b] for a, b in zip(one, other, strict=True)])  # sum and count of the one, of the other
    numbers, against = np.random.default_rng(0), 0
    for start in range(0, draws, at_once):
        often = numbers.multinomial(size, np.full(size, 1 / size), size=min(at_once, draws - start))
        totals = often @ values  # how often a sample is drawn, times what it counts
        with np.errstate(divide="ignore", invalid="ignore"):
            gaps = totals[:, 0] / totals[:, 1] - totals[:, 2] / totals[:, 3]
        against += int(np.sum(~(gaps * found > 0)))
    return min(1.0, 2 * (against + 1) / (draws + 1))
