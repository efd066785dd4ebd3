"""Busy neighbours: as many processes as there are other cores, each doing the same over and over while one is
measured.

A core beside which others compute is slower: they share the memory, and often the clock. How much, depends on what is
computed; so it is measured with just that. Neighbours are forks of the process that is measured, with one thread
each, as the workers of a DataLoader are; they end with it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from paceline.forked import Forks

_BEGIN_S = 20.0  # the longest wait for their first round


@contextlib.contextmanager
def busy_neighbours(work: Callable[[], object], cores: Sequence[int]) -> Iterator[None]:
    """Inside, one process on each of these cores does `work` again and again. Each has done it once by then."""
    began: list[int] = []
    try:
        with Forks() as neighbours:
            for core in cores:
                reading, writing = os.pipe()
                began.append(reading)
                neighbours.start(partial(_work, work, core, writing))
                os.close(writing)
            _await(began)
            yield
    finally:
        for descriptor in began:
            os.close(descriptor)


def _work(work: Callable[[], object], core: int, writing: int) -> None:
    """A neighbour's whole life."""
    os.sched_setaffinity(0, {core})
    work()
    os.write(writing, b".")
    while True:
        work()


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
