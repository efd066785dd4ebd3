"""Batches that come next, loaded in a thread while the model computes.

A thread is often enough, since most of reading, picking and collating runs outside the interpreter's lock, and it costs
no copy between processes. But it shares the process's random numbers with the model: a dataset that augments at random
should seed that by the index, or be loaded by workers (`workers.py`), which do.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Sequence
from typing import Any

from paceline.data.feed import Feed
from paceline.data.ledger import Ledger

Request = tuple[int, tuple[range, ...]]  # epoch, and the positions of each micro-batch


class Ahead:
    """A thread that loads what the caller said it will take next.

    The expectations may turn out wrong, above all when a replica dies and the others get larger parts. Then `take`
    loads what is asked for itself, and drops the other expectations, which were of the old division as well.
    """

    def __init__(self, feed: Feed, ledger: Ledger, depth: int = 2) -> None:
        self._feed, self._ledger, self._depth = feed, ledger, depth
        self._changed = threading.Condition()  # guards all below
        self._wanted: list[Request] = []
        self._loaded: dict[Request, list[Any] | BaseException] = {}  # only of requests that are wanted
        self._thread: threading.Thread | None = None
        self._closed = False

    def want(self, requests: Sequence[Request]) -> None:
        """Expect these, in this order. At most `depth` of them are loaded before they are taken."""
        with self._changed:
            if self._closed or self._depth < 1:
                return
            self._expect(list(dict.fromkeys(requests)))
            if self._wanted and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="paceline-ahead", daemon=True)
                self._thread.start()
                # A daemon thread that is inside torch when the interpreter goes away aborts the process.
                atexit.register(self.close)

    def take(self, epoch: int, ranges: tuple[range, ...]) -> list[Any]:
        """The micro-batches of these positions; waits for the thread if it was told, else loads them here."""
        request = (epoch, ranges)
        with self._changed:
            # What was expected before this one has been passed over. So this one is first, and its turn comes.
            at = self._wanted.index(request) if request in self._wanted else len(self._wanted)
            self._expect(self._wanted[at:])
            self._changed.wait_for(lambda: request in self._loaded or request not in self._wanted)
            outcome = self._loaded.get(request)
            self._expect([other for other in self._wanted if other != request])
        if isinstance(outcome, BaseException):
            raise outcome  # carries the traceback of the thread
        if outcome is not None:
            return outcome
        return [self._feed.load(self._ledger, epoch, positions) for positions in ranges]

    def peek(self, epoch: int, ranges: tuple[range, ...]) -> list[Any]:
        """The micro-batches of these positions if they are loaded already, else none."""
        with self._changed:
            outcome = self._loaded.get((epoch, ranges))
        return outcome if isinstance(outcome, list) else []

    def close(self) -> None:
        """End the thread. What is taken afterwards is loaded directly."""
        with self._changed:
            self._closed = True
            self._expect([])
        if self._thread is not None:
            atexit.unregister(self.close)
            # A dataset that hangs must not also hang the end of the run: then the thread is left behind.
            self._thread.join(timeout=1.0)

    def _expect(self, requests: list[Request]) -> None:
        self._wanted = requests
        self._loaded = {request: self._loaded[request] for request in requests if request in self._loaded}
        self._changed.notify_all()

    def _run(self) -> None:
        while (request := self._first_missing()) is not None:
            outcome = self._load(request)
            with self._changed:
                if outcome is not None and request in self._wanted:
                    self._loaded[request] = outcome
                    self._changed.notify_all()

    def _first_missing(self) -> Request | None:
        """The next request to load, once there is one; None when closed."""
        with self._changed:
            while not self._closed:
                for request in self._wanted[: self._depth]:
                    if request not in self._loaded:
                        return request
                self._changed.wait()
            return None

    def _load(self, request: Request) -> list[Any] | BaseException | None:
        """The micro-batches, or what went wrong, or None if nobody wants them any more."""
        epoch, ranges = request
        batches = []
        for positions in ranges:
            # Looked at between micro-batches, so that a caller with other wishes gets the feed soon.
            if request not in self._wanted:
                return None
            try:
                batches.append(self._feed.load(self._ledger, epoch, positions))
            except BaseException as error:
                return error
        return batches
