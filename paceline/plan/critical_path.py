"""Where the time of a step goes: pieces on the critical path, by kind and by what they were on.

The path leads back from a step's end by what each piece had waited for last. A piece is noted with all that passed from
there to its own end, so waiting for a busy resource counts as that resource's time. Of computing, what the slowest took
beyond the mean is waiting: a rule that need not wait for the slowest would save it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from paceline.plan.step import StepDescription

_SLOWED = 1.02  # by others on a shared link, rather than by its own


class CriticalPath:
    """Adds up what was on the path."""

    def __init__(
        self, step: StepDescription, in_turn: Sequence[int], links: Sequence[tuple[int, ...]], mean: float
    ) -> None:
        """`in_turn`, `links`: what each piece is on. `mean`: of the factors on compute times."""
        self._step, self._in_turn, self._mean = step, in_turn, mean
        load = [0.0] * len(step.resources)
        for piece, over in zip(step.pieces, links, strict=True):
            for link in over:
                load[link] += piece.bytes / step.resources[link].capacity
        # Of several shared links a piece is slow because of the one that has most to carry, for its capacity.
        self._heaviest = [max(over, key=lambda link: load[link], default=-1) for over in links]
        self._by_kind: defaultdict[str, float] = defaultdict(float)
        self._by_resource: defaultdict[int, float] = defaultdict(float)

    def forget(self) -> None:
        """What was noted does not count."""
        self._by_kind.clear()
        self._by_resource.clear()

    def note(self, place: int, elapsed_s: float) -> None:
        """A piece was on the path for so long."""
        piece = self._step.pieces[place]
        wait_s = 0.0
        if piece.kind == "compute" and self._step.closes != "each":
            wait_s = max(0.0, elapsed_s - piece.seconds * self._mean)
        self._by_kind[piece.kind] += elapsed_s - wait_s
        if wait_s:
            self._by_kind["wait"] += wait_s
        resource, link = self._in_turn[place], self._heaviest[place]
        own = self._step.resources[resource].capacity if resource >= 0 else math.inf
        if link >= 0 and (resource < 0 or elapsed_s - piece.seconds > _SLOWED * piece.bytes / own):
            resource = link
        self._by_resource[resource] += elapsed_s

    def by_kind(self) -> dict[str, float]:
        """Returns shares of the path."""
        total = sum(self._by_kind.values()) or 1.0
        return {kind: spent / total for kind, spent in sorted(self._by_kind.items())}

    def share_of(self, resources: Sequence[int]) -> float:
        """Returns the share of the path that was on these."""
        total = sum(self._by_kind.values()) or 1.0
        return sum(self._by_resource.get(number, 0.0) for number in resources) / total
