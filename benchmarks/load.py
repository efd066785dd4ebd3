"""Whether the machine was ours: how much of the cores other processes took meanwhile.

Ratios of two contestants that take turns forgive a busy neighbour only in part: one that waits by spinning suffers
otherwise than one that waits in the kernel. So a figure that was measured beside others says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import time
from pathlib import Path

WORTH_SAYING = 0.03
_SET_CHILD_SUBREAPER = 36  # of prctl


class OtherLoad:
    """What others have used since this was made. Time in the kernel is not counted: of that, nobody knows whose it is,
    least of all when it moves bytes between two processes."""

    def __init__(self) -> None:
        _adopt()
        self._before = _now()

    def share(self) -> float:
        """The part of all cores' time, from 0 to 1. Own processes count as such once they have been waited for."""
        _reap()
        wall_s, all_s, own_s = (now - before for now, before in zip(_now(), self._before, strict=True))
        return max(0.0, all_s - own_s) / (wall_s * (os.cpu_count() or 1))

    def note(self) -> str | None:
        """The sentence for the report, if there is something to say."""
        share = self.share()
        if share < WORTH_SAYING:
            return None
        return f"Other processes took {share:.0%} of the cores meanwhile: measure again on an idle machine."


def _adopt() -> None:
    """Has processes whose parent ends before them become children of this one, so that their time counts as its own."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap() -> None:
    """Waits for those that have ended. To be called when nobody else waits for a child of this process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _now() -> tuple[float, float, float]:
    """Seconds: of the clock, in which any process computed, in which this one and its children did."""
    user, nice = Path("/proc/stat").read_text().split()[1:3]
    own = sum(resource.getrusage(whose).ru_utime for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return time.monotonic(), (int(user) + int(nice)) / os.sysconf("SC_CLK_TCK"), own
