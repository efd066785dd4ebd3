"""How long steps take, from the end of one to the end of the next, left in the run folder for whoever wants to know.

A summary compares it with what was predicted. Only the first replica writes, twice a second at most, and a disk that
is full is no reason to end a run. What lies between two steps and belongs to neither (an evaluation, a save) is not
counted.
"""

from __future__ import annotations

import atexit
import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec

FILE = "step_times.json"
MOST_KEPT = 400
WRITE_EVERY_S = 0.5


class StepTimes(msgspec.Struct, frozen=True):
    """The last steps of a trainer, in seconds; how many there were in all; when the last of them ended."""

    steps: int
    seconds: list[float]
    ended: float = 0.0


class StepClock:
    """Notes when steps end. Without a run folder, or in another replica than the first, it does nothing."""

    def __init__(self, run_folder: str | None, rank: int) -> None:
        self._path = Path(run_folder) / FILE if run_folder is not None and rank == 0 else None
        self._seconds: deque[float] = deque(maxlen=MOST_KEPT)
        self._steps = 0
        self._last: float | None = None
        self._ended = 0.0
        self._written = 0.0
        if self._path is not None:
            atexit.register(self._write_if_last)

    def pause(self) -> None:
        """What follows until the next step is not part of one."""
        self._last = None

    def step_ended(self) -> None:
        if self._path is None:
            return
        now = time.monotonic()
        self._steps += 1
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = self._ended = now
        if now - self._written > WRITE_EVERY_S:
            self._written = now
            self._write()

    def _write_if_last(self) -> None:
        """At the end, when every trainer of a script comes by: what the last one did stays."""
        with suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
            if self._path is not None:
                found = msgspec.json.decode(self._path.read_bytes(), type=StepTimes)
                if found.ended > self._ended:
                    return
        self._write()

    def _write(self) -> None:
        path = self._path
        if path is None or not self._seconds:
            return
        with suppress(OSError):
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            beside.write_bytes(msgspec.json.encode(StepTimes(self._steps, list(self._seconds), self._ended)))
            os.replace(beside, path)
