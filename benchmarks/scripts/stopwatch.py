"""When each step ended, a line a step, in seconds of the machine's monotonic clock, which all processes share."""

from __future__ import annotations

import time
from pathlib import Path


class Stopwatch:
    """Writes the time of each `step` to a file. Without a path it does nothing, for all ranks but the first."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w", buffering=1) if path is not None else None

    def step(self) -> None:
        if self._file is not None:
            self._file.write(f"{time.monotonic():.9f}\n")
