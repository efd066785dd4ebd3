"""Forking a process that is to compute: it has shown that it can before anybody counts on it.

A fork copies one thread, and all locks as they are at that moment: one that another thread held then is held for ever
in the new process. Python and the C library put theirs right, the libraries below torch do not. MKL's allocator takes
a lock even as a thread ends, after Python has said that it has: next to threads that come and go one fork of sixty made
a process that spins in its first product of matrices, and never answers.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import warnings

from paceline.errors import ReplicaDied

_MOST_TRIES = 10
_CPU_S = 1.0  # that the proof may take: a product of small matrices takes a thousandth
_WALL_S = 30.0  # of a busy machine


def fork_to_compute() -> int:
    """Returns as `os.fork` does, but of a new process that can compute; those that cannot are ended, and forked again.

    In the new process torch has one thread: it cannot have its parent's.
    """
    for _ in range(_MOST_TRIES):
        reading, writing = os.pipe2(os.O_CLOEXEC)
        with warnings.catch_warnings():
            # Python warns of threads that hold locks while a process forks: that is what is looked at here.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if not process:
            try:
                os.close(reading)
                _show_that_it_computes()
                os.write(writing, b"!")
                os.close(writing)
            except BaseException:  # who has called this must not be there twice
                os._exit(1)
            return 0
        os.close(writing)
        if _has_shown(process, reading):
            return process
    raise ReplicaDied(
        f"{_MOST_TRIES} processes were forked in vain: each came upon a lock that another thread of this process held, "
        "fork before such threads are started"
    )


def _show_that_it_computes() -> None:
    if (torch := sys.modules.get("torch")) is None:
        return
    before = signal.signal(signal.SIGVTALRM, signal.SIG_DFL)  # it ends the process
    signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_S)
    torch.set_num_threads(1)
    compute(torch.ones(64, 64, dtype=torch.float32, device="cpu"))
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)


def compute(matrix: object) -> object:
    """What a process shows that it can: a product for which MKL needs memory."""
    return matrix @ matrix  # type: ignore[operator]


def _has_shown(process: int, reading: int) -> bool:
    """Waits for the new process; one that does not come through is ended."""
    ended = os.pidfd_open(process)
    try:
        waiting = select.poll()
        waiting.register(reading, select.POLLIN)
        waiting.register(ended, select.POLLIN)
        waiting.poll(1000 * _WALL_S)
        os.set_blocking(reading, False)
        with contextlib.suppress(BlockingIOError):  # somebody else who was forked meanwhile has the other end too
            if os.read(reading, 1):
                return True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(ended, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)
        return False
    finally:
        os.close(ended)
        os.close(reading)
