"""Sending and receiving by tags, on top of mailboxes between pairs.

A send copies the tensor into the mailbox and is done. A receive is a promise: it is kept when somebody waits for it or
asks whether it is complete, so that a batch of sends and receives cannot block itself, in whatever order it is given.
What arrives is given to the oldest receive that asks for it, and kept if nobody has asked yet.
"""

from __future__ import annotations

import torch

from paceline.errors import PacelineError
from paceline.exchange.mailboxes import BOX_BYTES, Peers
from paceline.torch_group.rank_group import RankGroup


def letters_bytes(count: int) -> int:
    return count * count * BOX_BYTES


class Receive:
    """A tensor that is to be filled with what somebody sends."""

    def __init__(self, flat: torch.Tensor, source: int | None, tag: int) -> None:
        self.flat = flat  # its bytes
        self.source = source  # None: anybody
        self.tag = tag
        self.complete = False

    def matches(self, source: int, tag: int) -> bool:
        return self.source in (None, source) and self.tag == tag


class TaggedMessages(Peers):
    """This rank's mailboxes."""

    def __init__(self, company: RankGroup, segment: int) -> None:
        arena, rank, count = company.arenas[segment], company.rank, company.count
        super().__init__(arena, company.board, rank, rank, count, company.timeout_s)
        self._company = company
        self._tags: dict[int, int] = {}  # by source: the tag of the letter that comes next
        self._unasked: list[tuple[int, int, torch.Tensor]] = []  # source, tag, bytes
        self._receives: list[Receive] = []

    def post(self, flat: torch.Tensor, to: int, tag: int) -> None:
        self.send(torch.tensor([tag]), to)
        self.send(flat, to)

    def ask(self, receive: Receive) -> None:
        for index, (source, tag, flat) in enumerate(self._unasked):
            if receive.matches(source, tag):
                del self._unasked[index]
                self._fill(receive, source, flat)
                return
        self._receives.append(receive)

    def take_in(self) -> None:
        """Give what has arrived to those who have asked for it."""
        for source, box in self._in.items():
            while (found := box.next()) is not None:
                tag = self._tags.pop(source, None)
                if tag is None:
                    self._tags[source] = int(found)
                else:
                    self._deliver(source, tag, found)

    def _deliver(self, source: int, tag: int, flat: torch.Tensor) -> None:
        for receive in self._receives:
            if receive.matches(source, tag):
                self._receives.remove(receive)
                self._fill(receive, source, flat)
                return
        self._unasked.append((source, tag, flat))

    def _fill(self, receive: Receive, source: int, flat: torch.Tensor) -> None:
        receive.source, receive.complete = source, True
        if flat.numel() != receive.flat.numel():
            raise PacelineError(
                f"rank {self.rank} receives {receive.flat.numel()} bytes from rank {source} (tag {receive.tag}), which "
                f"has sent {flat.numel()}: give a tensor of the size and type that is sent"
            )
        receive.flat.copy_(flat)

    def complete(self, receive: Receive) -> None:
        """Wait until it is."""

        def ready() -> bool:
            self.take_in()
            return receive.complete

        awaited = [receive.source] if receive.source is not None else [*self._in]
        if not ready():
            self._company.wait(ready, lambda: awaited, f"recv (tag {receive.tag})")

    def _wait(self, other: int, ready: object) -> None:
        self._company.wait(ready, lambda: [other], "send")  # type: ignore[arg-type]
