"""Memory that a process has once touched stays with it.

malloc gives a large block back to the kernel as soon as it is free, and asks for another when the next tensor is made:
every activation of every step is new memory, which the kernel clears and maps page by page. On large images that is a
third of a step. Here blocks up to a gigabyte are kept for the next tensor of that size.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

KEPT_BYTES = 1 << 30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_memory() -> None:
    """From now on, in this process. Where malloc is not glibc's nothing happens."""
    if mallopt := getattr(_libc(), "mallopt", None):
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def give_memory_back() -> None:
    """What is free now, once: after something large that will not come again."""
    if malloc_trim := getattr(_libc(), "malloc_trim", None):
        malloc_trim(0)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
