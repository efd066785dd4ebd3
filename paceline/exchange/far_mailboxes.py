"""Mailboxes between devices of one replica that are on different hosts: what is left there goes over torch.distributed.

Every other device has two threads, one that sends what was left for it, in order, and one that takes in what comes. So
whoever sends goes on computing meanwhile, and messages of both directions are on the link at once. A message is a
frame of fixed length, with a description and as much of the content as fits, followed by the rest. Before a process
ends it says goodbye: who still waits for it is told so at once.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch

from paceline.exchange.links import LOOK_EVERY, first_line, give_up
from paceline.exchange.mailboxes import DTYPES, ROOM_BYTES, WORDS, Assembly, described

UNLIMITED = timedelta(days=3650)  # a script may do something else for as long as it likes, and nothing comes meanwhile
_DESCRIPTION_BYTES = WORDS * 8
_FRAME_BYTES = 4096  # one message instead of two for what is small, and most is
_INSIDE_BYTES = _FRAME_BYTES - _DESCRIPTION_BYTES
_GOODBYE = -1  # as the length of a message
_LONGEST_GOODBYE_S = 10.0


class FarMailboxes:
    """This device's mailboxes to and from those on other hosts."""

    def __init__(self, group: Any, others: Sequence[int], beside: FarMailboxes | None = None) -> None:
        """`group`: of torch.distributed's, of all devices of the replica, by number. `beside`: other mailboxes of the
        same devices, which end with these."""
        self._group = group
        self._all: list[FarMailboxes] = beside._all if beside is not None else []
        self._all.append(self)
        tag = len(self._all)
        news = self._news = threading.Event()
        self.out = {other: _Outbox(group, other, tag, news) for other in others}
        self.into = {other: _Inbox(group, other, tag, news) for other in others}
        self.look: Callable[[], None] = lambda: None  # while this device waits for others
        self._said_goodbye = self._closed = False
        atexit.register(_close, weakref.ref(self))  # threads inside Gloo would abort a Python that ends

    def lost(self, device: int) -> str | None:
        """Returns who that device is, and why nothing will come from it; None: it may."""
        why = self.into[device].ended or self.out[device].failed
        return None if why is None else f"device {device}, which is on another host and {why}"

    def rest(self) -> None:
        """Returns when something may have come or gone, or after a moment."""
        if not self.pause(LOOK_EVERY.total_seconds()):
            self.look()

    def pause(self, longest_s: float) -> bool:
        """Returns True when something may have come or gone, and False after so long; for one thread only."""
        if not self._news.wait(longest_s):
            return False
        self._news.clear()  # whoever called looks again after this, so nothing is missed
        return True

    def wake(self) -> None:
        """Ends a pause."""
        self._news.set()

    def say_goodbye(self) -> None:
        """Nothing more will be left."""
        if not self._said_goodbye:
            self._said_goodbye = True
            for outbox in self.out.values():
                outbox.say_goodbye()

    def close(self) -> None:
        """Returns when all that was left has gone, and the others have said goodbye; or have not, for too long."""
        if self._closed:
            return
        self._closed = True
        for mailboxes in self._all:  # else somebody else may wait for the others' before it says these
            mailboxes.say_goodbye()
        threads = [box.thread for boxes in (self.out, self.into) for box in boxes.values()]
        if not _ended(threads, _LONGEST_GOODBYE_S):
            give_up(self._group, next(iter(self.out)))
            _ended(threads, 1.0)


class _Outbox:
    """What is left for one device."""

    def __init__(self, group: Any, to: int, tag: int, news: threading.Event) -> None:
        self.failed: str | None = None
        self._group, self._to, self._tag, self._news = group, to, tag, news
        self._left: SimpleQueue[tuple[list[int], torch.Tensor] | None] = SimpleQueue()
        self._bytes_left = self._bytes_sent = 0  # each has one writer
        self.thread = threading.Thread(target=self._send_all, name="paceline-to-device", daemon=True)
        self.thread.start()

    def post(self, part: torch.Tensor, whole: torch.Tensor) -> bool:
        """Leaves a part of a message, and returns True; False if there is no room at the moment."""
        if self._bytes_left - self._bytes_sent > ROOM_BYTES:
            return False
        content = part.clone().view(torch.uint8) if part.numel() else torch.empty(0, dtype=torch.uint8)
        self._left.put((described(part, whole), content))
        self._bytes_left += content.nbytes
        return True

    def say_goodbye(self) -> None:
        """Nothing more will be left."""
        self._left.put(None)

    def _send_all(self) -> None:
        try:
            while (message := self._left.get()) is not None:
                description, content = message
                self._send(_frame(description, content))
                if content.nbytes > _INSIDE_BYTES:
                    self._send(content[_INSIDE_BYTES:])
                self._bytes_sent += content.nbytes
                self._news.set()
            self._send(_frame([_GOODBYE], torch.empty(0, dtype=torch.uint8)))
        except RuntimeError as error:
            self.failed = f"cannot be reached ({first_line(error)})"
            self._news.set()

    def _send(self, tensor: torch.Tensor) -> None:
        self._group.send([tensor], self._to, self._tag).wait()


class _Inbox:
    """What comes from one device."""

    def __init__(self, group: Any, source: int, tag: int, news: threading.Event) -> None:
        self.ended: str | None = None  # why nothing more will come
        self._group, self._source, self._tag, self._news = group, source, tag, news
        self._messages = Assembly()
        self.thread = threading.Thread(target=self._receive_all, name="paceline-from-device", daemon=True)
        self.thread.start()

    @property
    def arrived(self) -> bool:
        """Returns whether there is a whole message."""
        return bool(self._messages.whole)

    def next(self) -> torch.Tensor | None:
        """Returns the next message; None if there is none."""
        return self._messages.whole.popleft() if self._messages.whole else None

    def take_in(self) -> None:
        """What comes is taken in by itself."""

    def clear(self) -> None:
        """Throws away what has arrived; nobody may send meanwhile."""
        self._messages.clear()

    def _receive_all(self) -> None:
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        try:
            while True:
                self._receive(frame)
                length, kind, last, dims, *shape = frame[:_DESCRIPTION_BYTES].view(torch.int64).tolist()
                if length == _GOODBYE:
                    self.ended = "has ended"
                    break
                place = self._messages.room(length, DTYPES[kind], bool(last), shape[:dims])
                if length:
                    content = place.view(torch.uint8)
                    content[:_INSIDE_BYTES] = frame[_DESCRIPTION_BYTES : _DESCRIPTION_BYTES + content.nbytes]
                    if content.nbytes > _INSIDE_BYTES:
                        self._receive(content[_INSIDE_BYTES:])
                self._messages.filled(length)
                self._news.set()
        except RuntimeError as error:
            self.ended = f"cannot be reached ({first_line(error)})"
        self._news.set()

    def _receive(self, into: torch.Tensor) -> None:
        self._group.recv([into], self._source, self._tag).wait()


def _frame(description: Sequence[int], content: torch.Tensor) -> torch.Tensor:
    frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
    frame[: len(description) * 8].view(torch.int64).copy_(torch.tensor(description))
    inside = content[:_INSIDE_BYTES]
    frame[_DESCRIPTION_BYTES : _DESCRIPTION_BYTES + inside.nbytes] = inside
    return frame


def _ended(threads: Sequence[threading.Thread], longest_s: float) -> bool:
    until = time.monotonic() + longest_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _close(mailboxes: weakref.ref[FarMailboxes]) -> None:
    if (found := mailboxes()) is not None:
        with suppress(RuntimeError):
            found.close()
