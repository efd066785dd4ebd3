"""What other programs use of this machine while something is measured: a measurement beside them is made again."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_STAT = Path("/proc/stat")


class LoadOfOthers:
    """Since this was made: how many cores others than this process, and its children that have ended, kept busy."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), _busy_s(), _own_s()

    def cores(self) -> float:
        """Returns how many, on average; 0 where the kernel does not tell."""
        lasted = time.monotonic() - self._began
        others = (_busy_s() - self._busy) - (_own_s() - self._own)
        return max(0.0, others / lasted) if lasted > 0 else 0.0


def _busy_s() -> float:
    """Seconds that all cores together were busy with anything since the machine started."""
    try:
        fields = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return 0.0
    idle = fields[3] + fields[4]
    return (sum(fields[:8]) - idle) / _TICKS


def _own_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
