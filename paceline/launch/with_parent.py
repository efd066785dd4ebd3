"""A process whose life is tied to its parent's: it has no reason to be without it."""

from __future__ import annotations

import ctypes
import os
import signal

PARENT_VARIABLE = "PACELINE_PARENT"  # pid without which the process has no reason to be

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends, however that happens."""
    parent = int(os.environ.pop(PARENT_VARIABLE))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel had been told
        os._exit(1)
