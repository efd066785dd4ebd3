"""Python's garbage collector rests while torch is loaded, and leaves what was loaded alone until the process ends.

Loading torch makes a quarter of a million objects that stay, and its compiler as many again. The collector goes through
all of them again and again meanwhile, and finds nothing: a sixth of the time that torch takes, a quarter of its
compiler's. Later it would go through them whenever it looks at everything, in the middle of a step; `gc.freeze` puts
them where it does not look. At the end it has to look once more: process groups that nobody has closed are closed then,
and a process in which their threads still run when it ends is aborted.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from paceline.launch.on_import import while_imported
from paceline.torch_private import COMPILER, EXPORTER

LARGE = ("torch", COMPILER, EXPORTER)


def rest_while_loading() -> None:
    """To be called before torch is imported, which is left to the script."""
    for name in LARGE:
        while_imported(name, _collector_rests)
    atexit.register(gc.unfreeze)


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
