"""A process that is woken often and computes little asks for short slices of a core, and so is let in sooner.

Linux's scheduler gives everybody the same share of a busy core, and among those who wait lets him run first whose slice
ends first. A short one costs no share; it is a promise not to stay long. Kernels before 6.12 do not know it, and then
all is as it was.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

SHORTEST_NS, USUAL = 100_000, 0
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")  # size, policy, flags, nice, priority, slice, and four that are for others
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}


def run_in_slices(slice_ns: int) -> None:
    """Has the calling thread, and what it starts from now on, run in such slices, if the kernel can."""
    number = _SCHED_SETATTR.get(platform.machine())
    if number is not None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, ctypes.c_char_p(attributes), 0)
