"""Shared memory itself: made here, opened here in other processes, and nowhere else. It needs no torch.

It is anonymous (`memfd_create`): it has no name in any folder, no limit but the machine's memory (a container's
small /dev/shm does not matter), and the kernel frees it when the last process that maps it has ended, however it
ended. Another process opens it through the descriptor of one that holds it.
"""

from __future__ import annotations

import errno
import os
import resource

from paceline.errors import ArenaError


def make(what: str, size: int, *, reserve: bool = False) -> int:
    """The descriptor of a new segment of zeros. `reserve` its pages now, so that full memory is an error here (OSError)
    and not a crash later; else memory is taken as it is used."""
    descriptor = os.memfd_create(f"paceline-{what}", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size) if reserve else os.ftruncate(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        if error.errno == errno.EFBIG:
            limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            raise ArenaError(
                f"shared memory of {size:,} bytes counts as a file, and ulimit -f allows {limit:,}: raise that limit"
            ) from error
        raise
    return descriptor


def open_held(process: int, descriptor: int) -> int:
    """A descriptor of this process for the segment that `process` holds open as `descriptor`."""
    try:
        return os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ArenaError(
            f"the shared memory of process {process} cannot be opened ({error.strerror}): "
            "replicas of one host must run as one user and see one another's processes"
        ) from error
