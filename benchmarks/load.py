"""Whether the machine was ours: how much of the cores other processes took meanwhile.

Ratios of two contestants that take turns forgive a busy neighbour only in part: one that waits by spinning suffers
otherwise than one that waits in the kernel. So a figure that was measured beside others says so.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

WORTH_SAYING = 0.03


class OtherLoad:
    """What others have used since this was made. Time in the kernel is not counted: of that, nobody knows whose it is,
    least of all when it moves bytes between two processes."""

    def __init__(self) -> None:
        self._before = _now()

    def share(self) -> float:
        """The part of all cores' time, from 0 to 1. Own processes count as such once they have been waited for."""
        wall_s, all_s, own_s = (now - before for now, before in zip(_now(), self._before, strict=True))
        return max(0.0, all_s - own_s) / (wall_s * (os.cpu_count() or 1))

    def note(self) -> str | None:
        """The sentence for the report, if there is something to say."""
        share = self.share()
        if share < WORTH_SAYING:
            return None
        return f"Other processes took {share:.0%} of the cores meanwhile: measure again on an idle machine."


def _now() -> tuple[float, float, float]:
    """Seconds: of the clock, in which any process computed, in which this one and its children did."""
    user, nice = Path("/proc/stat").read_text().split()[1:3]
    own = sum(resource.getrusage(whose).ru_utime for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return time.monotonic(), (int(user) + int(nice)) / os.sysconf("SC_CLK_TCK"), own
