"""Things done at the same time, by threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class BackgroundJob:
    """Runs something in a thread of its own."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-job", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._act()
        except BaseException as error:
            self._failure = error

    def wait(self) -> None:
        self._thread.join()

    def result(self) -> None:
        """Wait for its end, and raise what it has raised."""
        self.wait()
        if self._failure is not None:
            raise self._failure


def together(jobs: Sequence[Callable[[], None]]) -> None:
    """Do all at the same time; raise the first failure when all have ended."""
    others = [BackgroundJob(job) for job in jobs[1:]]
    try:
        jobs[0]()
    finally:
        for job in others:
            job.wait()
    for job in others:
        job.result()
