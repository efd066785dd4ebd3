"""Threads that wait for other hosts, and are left behind if they wait for ever.

Gloo tells whoever waits for a message that its connection is closed, but not if a part of that message has come
already: who waits then goes on waiting until the group's time is over, however the connection ended. Nothing can arrive
any more, and nothing but the thread itself is lost. So it is left to itself, others take its place, and Python does not
wait for it at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

_Job = tuple[Future[None], Callable[[], None]]


class LinkThreads:
    """So many threads, which do what they are given in turn."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._started = 0

    def submit(self, act: Callable[..., None], *args: Any, **kwargs: Any) -> Future[None]:
        """Returns at once; the future is done when `act(*args, **kwargs)` is."""
        if self._started < self._count:
            self._started += 1
            threading.Thread(target=_work, args=(self._jobs,), name="paceline-hosts", daemon=True).start()
        future: Future[None] = Future()
        self._jobs.put((future, lambda: act(*args, **kwargs)))
        return future

    def let_end(self, futures: Sequence[Future[None]], within_s: float) -> None:
        """Waits until these are done, whose connections are closed; leaves the threads of those that take longer."""
        if wait(futures, within_s).not_done:
            while not self._jobs.empty():
                if (job := self._jobs.get()) is not None:
                    job[0].cancel()
            self.close()
            self._jobs, self._started = SimpleQueue(), 0

    def close(self) -> None:
        """Lets the threads end when they have done what they were given."""
        for _ in range(self._started):
            self._jobs.put(None)


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        future, act = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            act()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del job, future, act  # what they hold is nobody's while this thread waits for the next
