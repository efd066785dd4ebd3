"""Stragglers that were asked for: `--slow 2:5x` has replica 2 take five times as long to compute its part of a step.

What a strategy does about a slow machine can only be seen with one. This makes one anywhere: the replica computes as
ever, and then waits until so many times the time has passed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.errors import StrategyError

_ENTRY = re.compile(r"(?P<replica>[0-9]{1,6}):(?P<factor>[0-9]{1,4}(?:\.[0-9]{1,6})?)x")


def parse_slow(text: str, replicas: int) -> dict[int, float]:
    """
    >>> parse_slow("2:5x,0:1.5x", replicas=4)
    {2: 5.0, 0: 1.5}
    """
    slow: dict[int, float] = {}
    for entry in text.split(","):
        found = _ENTRY.fullmatch(entry.strip())
        if not found or float(found["factor"]) <= 1.0:
            raise StrategyError("slow", text[:200], "give replicas and factors above 1, such as 2:5x or 0:2x,3:1.5x")
        replica = int(found["replica"])
        if replica >= replicas:
            expected = f"there is no replica {replica} among {replicas}, give a number up to {replicas - 1}"
            raise StrategyError("slow", text[:200], expected)
        if replica in slow:
            raise StrategyError("slow", text[:200], f"replica {replica} is there twice, give it once")
        slow[replica] = float(found["factor"])
    return slow


def slow_words(slow: Mapping[int, float]) -> str:
    """
    >>> slow_words({2: 5.0})
    '2:5x'
    """
    return ",".join(f"{replica}:{factor:g}x" for replica, factor in slow.items())
