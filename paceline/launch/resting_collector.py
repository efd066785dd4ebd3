"""Python's garbage collector rests while torch is loaded, and leaves what was loaded alone from then on.

Loading torch makes a quarter of a million objects that stay, and its compiler as many again. The collector goes through
all of them again and again meanwhile, and finds nothing: a sixth of the time that torch takes, a quarter of its
compiler's. Later it would go through them whenever it looks at everything, in the middle of a step; `gc.freeze` puts
them where it does not look. At the end it has to look once more: process groups that nobody has closed are closed then,
and a process in which their threads still run when it ends is aborted.

At the end Python takes every module to pieces, torch's thousand too, which is half of what the end of a process costs,
for memory that the kernel takes back anyway. So those are kept out of it; a script's own modules, its files and
whatever else it has left to Python are treated as ever.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from paceline.launch.on_import import while_imported
from paceline.torch_private import COMPILER, EXPORTER

LARGE = ("torch", COMPILER, EXPORTER)
KEPT_AT_THE_END = ("torch", "sympy", "mpmath")


def rest_while_loading() -> None:
    """To be called before torch is imported, which is left to the script."""
    for name in LARGE:
        while_imported(name, _collector_rests)
    atexit.register(_end_without_loaded)


def _end_without_loaded() -> None:
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    kept = [sys.modules.pop(name) for name in list(sys.modules) if _is_loaded_for_good(name)]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _is_loaded_for_good(name: str) -> bool:
    """Returns whether nothing that a script has made hangs on this module; torch.distributed has process groups."""
    return name.partition(".")[0] in KEPT_AT_THE_END and not f"{name}.".startswith("torch.distributed.")


@contextmanager
def _collector_rests(_: ModuleType) -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:  # else whoever has switched it off decides, or an import around this one
            gc.freeze()
            gc.enable()
