"""Copies of other servers' shares, in this server's memory.

A copy is a container like any other, to which nobody comes: a snapshot, and then again, one by one, the records of the
server whose share it is (`peer_journal.py`). Records are acknowledged when they are here, and gone through after that:
nobody waits for that but the next of them.

Every message has the number of its server's process. Once a newer process has asked for its share, or sent one, older
ones are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from paceline.central.container.bounds import check_count, check_record
from paceline.central.container.runs import Share
from paceline.central.durability.recovery import rebuilt
from paceline.central.durability.snapshot import Tensors, again, whole
from paceline.central.messages.notes import ShareNotes
from paceline.central.messages.records import AnyRecord
from paceline.central.messages.replies import Done, Missing
from paceline.central.messages.requests import Fetch, Forget, Keep, KeepWhole
from paceline.errors import PacelineError

NO_RECORD = (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, RuntimeError)


class KeptShare:
    """A copy of one server's share of one container."""

    def __init__(self, incarnation: int, share: Share) -> None:
        self.lock = threading.Lock()  # guards all below
        self.incarnation = incarnation
        self.position = 0  # records that are here
        self._share = share
        self._pending: list[tuple[AnyRecord, memoryview]] = []  # acknowledged, and to be gone through
        self._broken: str | None = None

    def fence(self, server: int, incarnation: int) -> None:
        if incarnation < self.incarnation:
            raise PacelineError(f"server {server} was started again since: this process no longer takes part")
        self.incarnation = incarnation

    def take(self, request: Keep, body: memoryview) -> bool:
        """Take the records of a message that are not here already; return whether they follow what is here."""
        with self.lock:
            self.fence(request.server, request.incarnation)
            self._settle()
            if self._broken is not None or request.position > self.position:
                return False
            for record in request.records:
                check_record(record, self._share.container)
            start, fresh = 0, self.position - request.position  # an answer may have been lost on the way
            for number, (record, size) in enumerate(zip(request.records, request.lengths, strict=True)):
                if number >= fresh:
                    self._pending.append((record, body[start : start + size]))
                start += size
            self.position = max(self.position, request.position + len(request.records))
            return True

    def settle(self) -> None:
        with self.lock:
            self._settle()

    def _settle(self) -> None:
        try:
            for record, body in self._pending:
                again(self._share, record, body)
        except (PacelineError, *NO_RECORD) as error:
            self._broken = str(error)  # its server sends a new one
        self._pending = []

    def give(self, request: Fetch) -> tuple[Tensors, ShareNotes, int] | None:
        """Return all of it, for a new process of the server whose it is."""
        with self.lock:
            self.fence(request.server, request.incarnation)
            self._settle()
            if self._broken is not None:
                return None
            return *whole(self._share), self.position

    def close(self) -> None:
        with self.lock:
            self._broken = "it was forgotten"
            self._pending = []
            self._share.close()


class Backup:
    """Holds all copies that a server keeps."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[tuple[str, int], KeptShare] = {}

    def _find(self, container: str, server: int) -> KeptShare | None:
        with self._lock:
            return self._copies.get((container, server))

    def take_whole(self, request: KeepWhole, tensors: Tensors) -> None:
        """Take a copy, in the place of what was there."""
        try:
            share = rebuilt(tensors, request.notes, lambda *_: [], request.container, request.server)
        except NO_RECORD as error:
            raise PacelineError(f"this is no copy of a container ({type(error).__name__}: {error})") from error
        copy, key = KeptShare(request.incarnation, share), (request.container, request.server)
        with self._lock:
            old = self._copies.get(key)
            if old is not None:
                try:
                    with old.lock:
                        old.fence(request.server, request.incarnation)
                except PacelineError:
                    copy.close()
                    raise
            self._copies[key] = copy
        if old is not None:
            old.close()

    def take(self, request: Keep, body: memoryview) -> tuple[Done | Missing, Callable[[], None] | None]:
        """Return the answer, and what is to be done when that is sent; `body` must stay as it is until then."""
        check_count("position", request.position)
        if len(request.lengths) != len(request.records) or min(request.lengths, default=0) < 0:
            raise PacelineError(f"{len(request.records)} records do not fit {len(request.lengths)} lengths")
        if sum(request.lengths) != len(body):
            raise PacelineError(f"records of {sum(request.lengths)} bytes are not in a body of {len(body)}")
        copy = self._find(request.container, request.server)
        if copy is None or not copy.take(request, body):
            return Missing(), None
        return Done(), copy.settle

    def give(self, request: Fetch) -> tuple[Tensors, ShareNotes, int] | None:
        copy = self._find(request.container, request.server)
        return None if copy is None else copy.give(request)

    def forget(self, request: Forget) -> None:
        copy = self._find(request.container, request.server)
        if copy is not None:
            with copy.lock:
                copy.fence(request.server, request.incarnation)
            with self._lock:
                self._copies.pop((request.container, request.server), None)
            copy.close()

    @property
    def held(self) -> Sequence[tuple[str, int]]:
        """Return containers and servers of which there are copies."""
        with self._lock:
            return sorted(self._copies)
