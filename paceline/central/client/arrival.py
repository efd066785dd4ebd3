"""Gradients that are sent while backward still runs.

Backward finishes parameters from the last layer to the first, which is the order in which their chunks lie. A sender
goes along the chunks and waits at each for the gradients in it to arrive.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from paceline.central.shards import Shards
from paceline.errors import PacelineError


class StepAbandoned(PacelineError):
    """Backward has failed: what was being sent will never be complete, and must not be sent again."""


class Arrival:
    """Knows which gradients of a step are complete."""

    def __init__(self, shards: Shards) -> None:
        chunk_of = [
            {piece.slot: number for number, chunk in enumerate(layout.chunks) for piece in chunk.pieces}
            for layout in shards.layouts
        ]
        self._chunks = [  # by parameter: on which server, in which chunk its parts are
            {(part.server, chunk_of[part.server][part.slot]) for part in shards.parts[name]} for name in shards.names
        ]
        self._expected = Counter(chunk for chunks in self._chunks for chunk in chunks)
        self._changed = threading.Condition()
        self._missing: Counter[tuple[int, int]] = Counter()
        self._finished = self._given_up = False

    def begin(self) -> None:
        """A step begins: nothing of it is there."""
        with self._changed:
            self._missing = self._expected.copy()
            self._finished = self._given_up = False

    def arrived(self, parameter: int) -> None:
        with self._changed:
            for chunk in self._chunks[parameter]:
                self._missing[chunk] -= 1
            self._changed.notify_all()

    def finish(self) -> None:
        """Backward is over: what has not arrived has no gradient."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def give_up(self) -> None:
        """Backward will never be over."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def wait(self, server: int, chunk: int) -> None:
        """Wait until everything in that chunk has arrived."""
        self._wait(lambda: self._missing[server, chunk] <= 0)

    def wait_for_all(self) -> None:
        self._wait(lambda: False)

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: ready() or self._finished or self._given_up)
            if self._given_up:
                raise StepAbandoned("the step was given up")
