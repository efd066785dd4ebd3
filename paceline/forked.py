"""Forking a process that is to compute: it has shown that it can before anybody counts on it.

A fork copies one thread, and all locks as they are at that moment: one that another thread held then is held for ever
in the new process. Python and the C library put theirs right, the libraries below torch do not. MKL's allocator takes
a lock even as a thread ends, after Python has said that it has: next to threads that come and go one fork of sixty made
a process that spins in its first product of matrices, and never answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable

from paceline.errors import ReplicaDied

_PR_SET_PDEATHSIG = 1
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


def end_with_parent(parent: int) -> None:
    """From now on the kernel kills this process when its parent ends, however that happens.

    If the parent's main thread has started it: the kernel means that thread, not the process that it belongs to.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel had been told
        os._exit(1)


class Forks:
    """Processes that this one's main thread forks; they end with it, or when there is no more use for them."""

    def __init__(self) -> None:
        self._processes: list[int] = []

    def __enter__(self) -> Forks:
        return self

    def start(self, live: Callable[[], object]) -> None:
        """Starts one that does this, and ends."""
        parent = os.getpid()
        if process := fork_to_compute():
            self._processes.append(process)
            return
        status = 1
        try:
            end_with_parent(parent)
            live()
            status = 0
        finally:
            os._exit(status)

    def failed(self) -> bool:
        """Returns whether one of them has ended otherwise than as it should."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        ended = (os.waitid(os.P_PID, process, how) for process in self._processes)
        return any(found.si_status for found in ended if found is not None)

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for process in self._processes:
            os.waitpid(process, 0)


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
