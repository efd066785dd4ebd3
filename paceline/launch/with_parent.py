"""A process whose life is tied to its parent's: it has no reason to be without it."""

from __future__ import annotations

import os

from paceline.forked import end_with_parent

PARENT_VARIABLE = "PACELINE_PARENT"  # pid without which the process has no reason to be


def die_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends, however that happens."""
    end_with_parent(int(os.environ.pop(PARENT_VARIABLE)))
