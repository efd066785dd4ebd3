"""Busy neighbours: as many processes as there are other cores, each doing the same over and over while one is
measured.

A core beside which others compute is slower: they share the memory, and often the clock. How much, depends on what is
computed; so it is measured with just that. Neighbours are forks of the process that is measured, with one thread
each, as the workers of a DataLoader are; they end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from paceline.forked import fork_to_compute

_PR_SET_PDEATHSIG = 1
_BEGIN_S = 20.0  # the longest wait for their first round


@contextlib.contextmanager
def busy_neighbours(work: Callable[[], object], cores: Sequence[int]) -> Iterator[None]:
    """Inside, one process on each of these cores does `work` again and again. Each has done it once by then."""
    began: list[int] = []
    children: list[int] = []
    try:
        for core in cores:
            reading, writing = os.pipe()
            began.append(reading)
            child = fork_to_compute()
            if not child:
                _work(work, core, writing)
            os.close(writing)
            children.append(child)
        _await(began)
        yield
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for descriptor in began:
            os.close(descriptor)


def _work(work: Callable[[], object], core: int, writing: int) -> None:
    """The child's whole life."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.sched_setaffinity(0, {core})
        work()
        os.write(writing, b".")
        while True:
            work()
    finally:
        os._exit(1)


def _await(began: Sequence[int]) -> None:
    give_up = time.monotonic() + _BEGIN_S
    for descriptor in began:
        os.set_blocking(descriptor, False)
        while time.monotonic() < give_up:
            with contextlib.suppress(BlockingIOError):
                os.read(descriptor, 1)
                break
            time.sleep(0.002)


@contextlib.contextmanager
def on_cores(cores: Sequence[int], threads: int) -> Iterator[None]:
    """Inside, this thread runs on these cores and torch uses so many threads."""
    before, count = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(count)
