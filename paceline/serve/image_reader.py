"""Images are read in a thread of their own, one at a time: a picture of many pixels takes a second and much memory.

Whoever answers others goes on meanwhile. Few may wait: the rest is refused at once, as any request is that nobody has
time for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from paceline.serve.batching import Refusal
from paceline.serve.model_pool import busy

MOST_WAITING = 16

Read = TypeVar("Read")


class ImageReader:
    """The thread, and how many images it has before it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "paceline-images")
        self._waiting = 0

    async def read(self, read: Callable[[], Read]) -> Read:
        """Returns what `read` gives. One whose task is cancelled before its turn is not read."""
        if self._waiting >= MOST_WAITING:
            raise busy(Refusal(f"{self._waiting} images are to be read before it, and there is no room for more", 1.0))
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, read)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Reads no more; nobody waits for the one that is being read."""
        self._thread.shutdown(wait=False, cancel_futures=True)
