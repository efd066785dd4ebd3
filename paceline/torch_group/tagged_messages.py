"""Sending and receiving by tags, on top of mailboxes between pairs.

A send copies the tensor into the mailbox and is done. A receive is a promise: it is kept when somebody waits for it or
asks whether it is complete, so that a batch of sends and receives cannot block itself, in whatever order it is given.
What arrives is given to the oldest receive that asks for it, and kept if nobody has asked yet.
"""

from __future__ import annotations

import torch

from paceline.exchange.mailboxes import BOX_BYTES, DTYPE_NUMBERS, DTYPES, Peers
from paceline.torch_group.errors import CallError
from paceline.torch_group.flat_tensors import outside_inference
from paceline.torch_group.rank_group import RankGroup


def messages_bytes(count: int) -> int:
    """The memory that the mailboxes of so many ranks need."""
    return count * count * BOX_BYTES


class Receive:
    """A tensor that is to be filled with what somebody sends."""

    def __init__(self, flat: torch.Tensor, source: int | None, tag: int) -> None:
        self.flat = flat
        self.source = source  # None: anybody
        self.tag = tag
        self.complete = False
        self.wrong = ""  # what was sent is something else

    def matches(self, source: int, tag: int) -> bool:
        return self.source in (None, source) and self.tag == tag


class TaggedMessages(Peers):
    """This rank's mailboxes."""

    def __init__(self, ranks: RankGroup, segment: int) -> None:
        """`segment`: which of the group's the mailboxes are in."""
        arena, rank, count = ranks.arenas[segment], ranks.rank, ranks.count
        super().__init__(arena, ranks.board, rank, rank, count, ranks.timeout_s)
        self._ranks = ranks
        self._announced: dict[int, tuple[int, int]] = {}  # by source: tag and type of the message that comes next
        self._unasked: list[tuple[int, int, int, torch.Tensor]] = []  # source, tag, type, bytes
        self._receives: list[Receive] = []

    def post(self, flat: torch.Tensor, to: int, tag: int) -> None:
        self._know(to, "send", "to")
        self.send(torch.tensor([tag, DTYPE_NUMBERS[flat.dtype]]), to)
        self.send(flat.view(torch.uint8), to)

    def ask(self, receive: Receive) -> None:
        if receive.source is not None:
            self._know(receive.source, "recv", "from")
        for index, (source, tag, dtype, flat) in enumerate(self._unasked):
            if receive.matches(source, tag):
                del self._unasked[index]
                self._fill(receive, source, dtype, flat)
                return
        self._receives.append(receive)

    def _know(self, other: int, call: str, way: str) -> None:
        if other not in self._in:
            raise CallError(f"rank {self.rank} calls {call} {way} rank {other}: give another of the {self.count} ranks")

    def take_in(self) -> None:
        """Give what has arrived to those who have asked for it."""
        with outside_inference():
            for source, box in self._in.items():
                while (found := box.next()) is not None:
                    announced = self._announced.pop(source, None)
                    if announced is None:
                        tag, dtype = found.tolist()
                        self._announced[source] = tag, dtype
                    else:
                        self._deliver(source, *announced, found)

    def _deliver(self, source: int, tag: int, dtype: int, flat: torch.Tensor) -> None:
        for receive in self._receives:
            if receive.matches(source, tag):
                self._receives.remove(receive)
                self._fill(receive, source, dtype, flat)
                return
        self._unasked.append((source, tag, dtype, flat))

    def _fill(self, receive: Receive, source: int, dtype: int, flat: torch.Tensor) -> None:
        """Whoever waits for it is told what is wrong: this may be in the middle of something else."""
        receive.source, receive.complete = source, True
        if flat.nbytes != receive.flat.nbytes or dtype != DTYPE_NUMBERS[receive.flat.dtype]:
            receive.wrong = (
                f"rank {self.rank} receives {receive.flat.nbytes} bytes of {receive.flat.dtype} from rank {source} "
                f"(tag {receive.tag}), which has sent {flat.nbytes} of {DTYPES[dtype]}: give a tensor of what is sent"
            )
        else:
            receive.flat.view(torch.uint8).copy_(flat)

    def complete(self, receive: Receive, limit_s: float | None) -> None:
        """Wait until it is."""

        def ready() -> bool:
            self.take_in()
            return receive.complete

        awaited = [receive.source] if receive.source is not None else [*self._in]
        if not ready():
            self._ranks.wait(ready, lambda: awaited, f"recv (tag {receive.tag})", limit_s)
        if receive.wrong:
            raise CallError(receive.wrong)

    def _wait(self, other: int, ready: object) -> None:
        with outside_inference():
            self._ranks.wait(ready, lambda: [other], "send")  # type: ignore[arg-type]
