"""Loaded once by what the tests' runs are forked from: at the end of such a process torch is not taken to pieces.

That is half of what the end of a process costs, hundreds of times in a run of the tests. It is not for users: what a
script has left to Python at its end, and torch still holds, has no end then (`launch/test_script_ends.py`).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys


def _leave_torch_alone() -> None:
    atexit.unregister(gc.unfreeze)  # which would have the collector go through all of torch, three times
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    kept = [sys.modules.pop(name) for name in list(sys.modules) if _is_torch(name)]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _is_torch(name: str) -> bool:
    """Process groups that nobody has closed are closed with torch.distributed: else their threads abort the process."""
    return name.partition(".")[0] in ("torch", "sympy") and not f"{name}.".startswith("torch.distributed.")


atexit.register(_leave_torch_alone)
