"""Where this user's files lie that save time in the next run: calibrations, profiles, graphs. Does not import torch."""

from __future__ import annotations

import os
from pathlib import Path

CACHE = "PACELINE_CACHE"


def cache_folder() -> Path | None:
    """Returns `$PACELINE_CACHE`, or `paceline` in the user's own cache folder. None: nothing is to be kept (the
    variable is empty), or there is nowhere to keep it (a user without a home)."""
    given = os.environ.get(CACHE)
    if given is not None:
        return Path(given) if given else None
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
    except RuntimeError:
        return None
