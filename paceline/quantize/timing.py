"""How long something takes on one core: processor time of this thread, so that other work of the machine is not in it.

What is compared takes turns, and each figure is the median of its turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

TURNS = 7
LEAST_TURN_S = 0.002
Name = TypeVar("Name")


def time_in_turns(
    calls: Mapping[Name, Callable[[], Any]], prepare: Callable[[Name], None] = lambda _: None
) -> dict[Name, float]:
    """Returns the seconds that each call takes; `prepare` is called before each turn, and does not count."""
    counts = {}
    for name, call in calls.items():
        prepare(name)
        call()  # the first prepares what later ones use
        took = _seconds(call, 1)
        counts[name] = max(1, round(LEAST_TURN_S / max(took, 1e-6)))
    taken: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            prepare(name)
            taken[name].append(_seconds(call, counts[name]))
    return {name: statistics.median(times) for name, times in taken.items()}


def _seconds(call: Callable[[], Any], count: int) -> float:
    began = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - began) / count


@contextmanager
def one_core() -> Iterator[None]:
    """Inside, torch computes with one thread and without gradients."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(threads)
