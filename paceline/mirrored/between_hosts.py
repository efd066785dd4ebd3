"""Gradients on their way to the other hosts while backward still runs.

Chunks lie in the order in which backward finishes them, and travel in buckets. As soon as every replica of this
host has finished a bucket, each owner sums its part of it from shared memory and sends it off, in a thread of its
own: the link works while the model computes. What comes back, summed over all hosts, lies in the arena's `sums`.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

from paceline.errors import Stalled
from paceline.exchange.board import Members, Phase, Word
from paceline.exchange.links import Links
from paceline.exchange.together import Together
from paceline.memory.model_arena import ModelArena
from paceline.mirrored.owner import Owner, sum_into

BUCKET_BYTES = 8 << 20
_BUCKET_BITS = 16
_LOOK_EVERY_S = 0.0003


class BetweenHosts:
    """Sends this owner's shard, bucket by bucket."""

    def __init__(self, together: Together, arena: ModelArena, owner: Owner, links: Links) -> None:
        self._together = together
        self._arena = arena
        self._owner = owner
        self._links = links
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-courier")
        self._sending: Future[None] | None = None
        self._op = 0
        self._waiting_for: list[set[int]] = []  # by bucket: slots whose gradients have not landed yet
        self._landed = 0

    def begin(self, members: Members) -> None:
        """A step begins."""
        self._op = members.op
        self._landed = 0
        slots_of = [[piece.slot for piece in chunk.pieces] for chunk in self._arena.layout.chunks]
        buckets = len(self._owner.buckets(members.chief))
        self._waiting_for = [set() for _ in range(buckets)]
        for rank in members.ranks:
            for index, bucket in enumerate(self._owner.buckets(rank)):
                for number in bucket:
                    self._waiting_for[index].update(slots_of[number])
        self._report()
        self._sending = self._thread.submit(self._send, members)

    def landed(self, slot: int) -> None:
        """The gradient of `slot` is complete in this replica's buffer."""
        for waiting in self._waiting_for[self._landed :]:
            waiting.discard(slot)
        while self._landed < len(self._waiting_for) and not self._waiting_for[self._landed]:
            self._landed += 1
        self._report()

    def all_landed(self) -> None:
        """Backward is over: whatever has not landed is zero."""
        self._landed = len(self._waiting_for)
        self._report()

    def finish(self) -> None:
        """Return when everything has come back."""
        assert self._sending is not None
        self._together.board.enter(self._together.replica, Phase.AWAITING_HOSTS)
        self._sending.result()

    def _report(self) -> None:
        self._together.board.set(self._together.replica, Word.LANDED, self._op << _BUCKET_BITS | self._landed)

    def _send(self, members: Members) -> None:
        for index, bucket in enumerate(self._owner.buckets(self._together.replica)):
            self._await_bucket(members, index)
            for first, last in self._runs(bucket):
                self._send_run(members, first, last)

    def _await_bucket(self, members: Members, index: int) -> None:
        """Sleeps between looks: this thread shares its interpreter with backward."""
        wanted = members.op << _BUCKET_BITS | index + 1
        give_up = time.monotonic() + self._together.timeout_s
        board = self._together.board
        while any(board.get(rank, Word.LANDED) < wanted for rank in members.ranks):
            if time.monotonic() > give_up:
                raise Stalled(f"gradients did not land in {self._together.timeout_s:g} s: {board.who_waits()}")
            time.sleep(_LOOK_EVERY_S)

    def _runs(self, bucket: list[int]) -> list[tuple[int, int]]:
        """Neighbouring chunks of one type, as first and last chunk number: each run is sent as a whole."""
        chunks = self._arena.layout.chunks
        runs: list[tuple[int, int]] = []
        for number in bucket:
            if runs and chunks[runs[-1][1]].dtype == chunks[number].dtype:
                runs[-1] = (runs[-1][0], number)
            else:
                runs.append((number, number))
        return runs

    def _send_run(self, members: Members, first: int, last: int) -> None:
        chunks = self._arena.layout.chunks
        dtype = chunks[first].dtype
        for number in range(first, last + 1):  # by chunk: each is still in the cache when it is added to
            chunk = chunks[number]
            parts = [self._arena.chunk_of(self._arena.gradients[rank], chunk) for rank in members.ranks]
            sum_into(self._arena.chunk_of(self._arena.sums, chunk), parts)
        run = self._arena.sums[chunks[first].start : chunks[last].stop].view(dtype)
        self._links.sum_values(first, run)
