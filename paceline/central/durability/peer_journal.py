"""A server's journal in the memory of another: what it must not forget is there before anybody is told of it.

Servers stand in a ring. Each keeps a copy of its share of a container on the next one, which makes of every record the
same as recovery would (`backup.py`). So a copy is never larger than the share, and nothing has to be written out from
time to time:

    server 0 ──records──▶ server 1 ──records──▶ server 2 ──records──▶ server 0

Records are *written* in order, under locks, and sent by `flush`, without any: one thread sends for all who wait. If the
other side was started again, and has no copy any more, it is sent a new one before anything is acknowledged.

All that is on disk is a note where to ask after a restart:

    kept-by   container, server, addresses; the number of the process, which is higher than that of any before it; and
              in a line of its own the checksum of that
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline.central.container.bounds import check_count
from paceline.central.container.journal import Journal
from paceline.central.durability.record_file import ADVICE
from paceline.central.messages.connection import Connection
from paceline.central.messages.notes import ShareNotes
from paceline.central.messages.records import AnyRecord, Made, PulledCopy, packed
from paceline.central.messages.replies import Done, Missing
from paceline.central.messages.requests import Forget, Keep, KeepWhole
from paceline.central.messages.tensor_bytes import Entry, entries_of
from paceline.errors import CheckpointError, PacelineError

NOTE = "kept-by"
MOST_AT_ONCE, MOST_BYTES_AT_ONCE = 256, 64 << 20  # records in one message; one may be larger
WAIT_LESS = 0.9  # than whoever waits for an answer of this server: it is to hear why
ASK_EVERY_S = 1.0  # whether the copy is still there, when there is nothing to send
FORGET_WITHIN_S = 2.0

Say = Callable[[str], None]


class Link(Connection):
    """To the server that keeps a copy."""

    lost: Callable[[], None] | None = None  # said when it breaks; that it is made again takes a while

    def disconnect(self) -> None:
        broke = self._channel is not None
        super().disconnect()
        if broke and self.lost is not None:
            self.lost()


Connect = Callable[[str, str, str, float], Link]  # address, who, name, timeout_s


@dataclass(frozen=True)
class KeptBy:
    """Where the copy of a server's share is."""

    container: str
    server: int
    addresses: list[str]
    timeout_s: float
    incarnation: int

    @property
    def backup(self) -> int:
        """The server that has it."""
        return (self.server + 1) % len(self.addresses)

    @property
    def whose(self) -> dict[str, Any]:
        """What every request about the copy says."""
        return {"container": self.container, "server": self.server, "incarnation": self.incarnation}

    @classmethod
    def read(cls, folder: Path) -> KeptBy:
        path = folder / NOTE
        try:
            content, _, crc = path.read_bytes().rpartition(b"\n")
            if crc != b"%08x" % zlib.crc32(content):
                raise ValueError("its checksum is not that of its content")
            note = msgspec.json.decode(content, type=cls)
            check_count("server", note.server, len(note.addresses) - 1)
            return note
        except (OSError, ValueError, PacelineError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; {ADVICE}") from error

    def write(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            draft = folder / f"{NOTE}.tmp"
            content = msgspec.json.encode(self)
            draft.write_bytes(content + b"\n%08x" % zlib.crc32(content))
            draft.replace(folder / NOTE)
        except OSError as error:
            raise PacelineError(f"{folder / NOTE} cannot be written ({error.strerror}): make room there") from error

    def connect(self, connect: Connect) -> Link:
        names = f"server {self.server}", f"server {self.backup}, which keeps its copy,"
        return connect(self.addresses[self.backup], *names, WAIT_LESS * self.timeout_s)


@dataclass(frozen=True)
class _Whole:
    entries: list[Entry]
    notes: ShareNotes
    body: list[memoryview]
    upto: int


@dataclass(frozen=True)
class _Item:
    record: AnyRecord
    body: Sequence[memoryview]
    upto: int  # what `kept` is when the other server has it

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in self.body)


class PeerJournal(Journal):
    """The journal of one container on one server, kept by the next one. A snapshot is never due: a copy does not grow.

    When the other side has lost its copy, `renew` has it sent again.
    """

    keeps = True

    def __init__(self, folder: Path, kept_by: KeptBy, connect: Connect, say: Say) -> None:
        super().__init__()
        self.folder = folder
        self.lock = threading.RLock()
        self.begun = False
        self._kept_by = kept_by
        self._connect, self._say = connect, say
        self._turn = threading.Condition()  # guards all below
        self._link: Link | None = None
        self._queue: deque[_Whole | _Item] = deque()  # written, not with the other server yet
        self._written = self._kept = 0
        self._position = 0  # records that the other server has, since its snapshot
        self._of_step: list[_Item] = []  # of a step that is written and not made: no snapshot has it
        self._sending = False
        self._failures: list[PacelineError] = []  # of sending
        self._heard_at = 0.0
        self._protected = True
        self._noted = False  # where to ask after a restart
        self._closed = False

    def resume(self, position: int) -> None:
        """Go on with the copy that is there."""
        self.begun = self._noted = True
        self._position = position
        self._heard_at = time.monotonic()
        self._kept_by.write(self.folder)

    def move(self, addresses: list[str]) -> None:
        """The servers are known under other addresses now."""
        with self._turn:
            if addresses != self._kept_by.addresses:
                self._kept_by = replace(self._kept_by, addresses=addresses)
                self._noted = False
                if self._link is not None:
                    self._link.give_up()
                    self._link = None

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────

    def seal(self, record: AnyRecord, body: Sequence[memoryview]) -> Sequence[memoryview]:
        return body

    def write(self, record: AnyRecord, body: Sequence[memoryview]) -> int:
        """Have a record sent by the next `flush`, and up to where that is. Its body must not change until then."""
        if not self.begun:
            return 0
        with self.lock, self._turn:
            self._written += 1
            item = _Item(record, body, self._written)
            self._queue.append(item)
            if isinstance(record, Made | PulledCopy):
                self._of_step.append(item)
            return self._written

    def made(self) -> None:
        """The step that was written last has been made."""
        with self._turn:
            self._of_step = []

    def snapshot(self, tensors: Mapping[str, torch.Tensor], notes: ShareNotes, *, wait: bool) -> None:
        """What is written so far is in this; call it with the lock held. `flush` sends it, whoever has to `wait`."""
        with self._turn:
            self.begun = True
            # A step is written before it is made. If this was taken in between, that step is sent again after it.
            self._of_step = [replace(item, upto=self._kept) for item in self._of_step]
            whole = _Whole(entries_of(tensors.items()), notes, packed(tensors.values()), self._kept)
            self._queue = deque([whole, *self._of_step])
            self._written += 1
            self._queue[-1] = replace(self._queue[-1], upto=self._written)

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────────

    def flush(self, upto: int | None = None) -> None:
        """Wait until the other server has so much, or all that is written; one sends for all who wait.

        Not with a lock held: to send a snapshot may need any of them.
        """
        self._flush(self._written if upto is None else upto, ask=False)

    def look(self) -> None:
        """Called now and then: a copy that was lost is sent again, also if nobody pushes."""
        idle = self.begun and not self._sending and not self._closed
        if idle and time.monotonic() - self._heard_at > ASK_EVERY_S:
            self._heard_at = time.monotonic()
            threading.Thread(target=self._ask, name="paceline-ask", daemon=True).start()

    def _ask(self) -> None:
        try:
            self._flush(0, ask=True)
        except PacelineError as error:
            if not self._closed:
                self._say(str(error))

    def _flush(self, upto: int, *, ask: bool) -> None:
        failures = len(self._failures)
        while True:
            with self._turn:
                if len(self._failures) > failures:
                    raise PacelineError(str(self._failures[-1])) from self._failures[-1]
                if self._kept >= upto and not ask:
                    return
                if self._sending:
                    if ask:
                        return
                    self._turn.wait()
                    continue
                self._sending = True
            try:
                there = self._send()
                if not there:
                    self._on_lost()
                    self.renew()
            except PacelineError as error:
                with self._turn:
                    self._failures.append(error)
                raise
            finally:
                with self._turn:
                    self._sending = False
                    self._turn.notify_all()
            ask = ask and not there

    def _send(self) -> bool:
        """What comes next in the queue, or nothing; whether the other side still has what that follows."""
        with self._turn:
            if self._closed:
                raise PacelineError(f"container {self._kept_by.container!r} was dropped")
            if self._link is None:
                self._link = self._kept_by.connect(self._connect)
                self._link.lost = self._on_lost
            link, position, head = self._link, self._position, self._queue[0] if self._queue else None
            items = self._next_items()
        whose = self._kept_by.whose
        if isinstance(head, _Whole):
            whole = head
            link.call(KeepWhole(**whose, entries=whole.entries, notes=whole.notes), Done, body=lambda: whole.body)
        else:
            lengths = [item.bytes for item in items]
            keep = Keep(**whose, position=position, records=[item.record for item in items], lengths=lengths)
            parts = [part for item in items for part in item.body]
            if isinstance(link.call(keep, (Done, Missing), body=lambda: parts), Missing):
                return False
        self._sent(head if isinstance(head, _Whole) else None, items)
        return True

    def _next_items(self) -> list[_Item]:
        items: list[_Item] = []
        size = 0
        for item in self._queue:
            if not isinstance(item, _Item) or (items and size + item.bytes > MOST_BYTES_AT_ONCE):
                break
            items.append(item)
            size += item.bytes
            if len(items) == MOST_AT_ONCE:
                break
        return items

    def _sent(self, whole: _Whole | None, items: Sequence[_Item]) -> None:
        with self._turn:
            self._heard_at = time.monotonic()
            self._position = 0 if whole is not None else self._position + len(items)
            done = [whole] if whole is not None else items
            for item in done:
                if self._queue and self._queue[0] is item:  # else a snapshot has taken its place
                    self._queue.popleft()
                    self._kept = max(self._kept, item.upto)
            note = whole is not None and not self._noted
            self._noted = self._noted or note
            back, self._protected = not self._protected, True
        if note:
            self._kept_by.write(self.folder)
        if back:
            self._say(f"{self._whose} is on server {self._kept_by.backup} again")

    @property
    def _whose(self) -> str:
        return f"a copy of server {self._kept_by.server}'s share of container {self._kept_by.container!r}"

    def _on_lost(self) -> None:
        with self._turn:
            said, self._protected = not self._protected or self._closed, False
        if not said:
            self._say(
                f"server {self._kept_by.backup} was lost, or started again: until it has {self._whose} again, that is "
                "not protected, and no push is acknowledged"
            )

    # ── ending ───────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        with self._turn:
            self._closed = True
            if self._link is not None:
                (self._link.give_up if self._sending else self._link.close)()

    def remove(self) -> None:
        """Nothing of it is needed any more, here or on the other server."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(PacelineError), contextlib.closing(self._kept_by.connect(self._connect)) as link:
            link.call(Forget(**self._kept_by.whose), Done, timeout_s=FORGET_WITHIN_S)
