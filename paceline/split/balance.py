"""Where a row of things that cost time is cut among devices, so that the slowest device is as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def even_bounds(costs: Sequence[int], parts: int) -> list[int]:
    """Returns where a row is cut into `parts` of neighbours, one or more each: the dearest part is as cheap as can be.

    >>> even_bounds([3, 1, 1, 1], 2), even_bounds([1, 1, 1, 5], 3)
    ([0, 1, 4], [0, 1, 3, 4])
    """
    nothing = [0] * (len(costs) + 1)
    _, places = best_places(range(1, len(costs)), [0, *accumulate(costs)], nothing, nothing, parts, None)
    return [0, *places, len(costs)]


def best_places(
    places: Sequence[int],
    total: Sequence[float],
    handed: Sequence[float],
    crossing: Sequence[int],
    stages: int,
    limit: float | None,
) -> tuple[float, list[int]]:
    """Returns the slowest stage's time, and the places. Without `limit` the slowest stage is as fast as can be; with
    it as few bytes cross as can be while no stage is slower than that."""
    ends = [*places, len(total) - 1]
    # By last place: (what is to be small, slowest stage, places) of the first k stages.
    reached: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for stage in range(stages):
        following: dict[int, tuple[float, float, list[int]]] = {}
        for end in ends:
            if (end == ends[-1]) != (stage == stages - 1):
                continue
            for begin, (small, slowest, chosen) in reached.items():
                if begin >= end:
                    continue
                took = total[end] - total[begin] + handed[begin] + (handed[end] if end != ends[-1] else 0.0)
                slower = max(slowest, took)
                if limit is not None and slower > limit:
                    continue
                value = slower if limit is None else small + (crossing[begin] if begin else 0)
                if end not in following or value < following[end][0]:
                    following[end] = (value, slower, [*chosen, begin] if begin else chosen)
        reached = following
    _, slowest, chosen = reached[ends[-1]]
    return slowest, chosen
