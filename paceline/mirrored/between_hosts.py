"""The other hosts of a run, if there are any: gradients go there while backward still runs.

Chunks lie in the order in which backward finishes them, and travel in buckets. As soon as every replica of this
host has finished a bucket, each owner sums its part of it from shared memory and sends it off, in a thread of its
own: the link works while the model computes. What comes back, summed over all hosts, lies in the arena's `sums`.

Of a loss that is (sum, count) the gradients are weighed before they are sent, so that a wire of few bits sees those of
the mean, and carries over what it loses in the same measure. By what to weigh them is known as soon as the first bucket
is complete: by then everybody's last forward is over, and has counted.

Of a cut model nothing is sent before backward is over: only then do its devices say which buffers have gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from paceline.errors import Stalled
from paceline.exchange.board import Board, Members
from paceline.exchange.links import LOOK_EVERY, Links
from paceline.exchange.other_hosts import OtherHosts
from paceline.exchange.together import Together
from paceline.exchange.words import OVER_SAMPLES, Kind, Phase, Word
from paceline.loop.lockstep import BatchShare
from paceline.memory.layout import Chunk, Slot
from paceline.memory.model_arena import ModelArena
from paceline.mirrored.owner import Owner, sum_into
from paceline.mirrored.step_parts import DecidedStep, StepPart

BUCKET_BYTES = 8 << 20
_BUCKET_BITS = 16
_LOOK_EVERY_S = 0.0003
_LOOK_AT_HOSTS_EVERY_S = LOOK_EVERY.total_seconds()


@dataclass(frozen=True)
class StepTotals:
    """What replicas have computed in a step."""

    samples: float
    counted: float  # what their losses are sums over; 0: means over samples


class OneHost(StepPart):
    """All replicas are on this host: nothing has to go anywhere."""

    number = 0
    count = 1
    sums_gradients = False  # over hosts, in every step
    bucket_bytes: int | None = None
    landed: Callable[[int], None] | None = None  # to be told of every gradient that is complete

    def open(self, arena: ModelArena, owner: Owner, buffers: Sequence[torch.Tensor]) -> None:
        """The gradients lie there, and are this owner's to sum; `buffers` are this process's own."""

    def here(self, among: Sequence[int], count: int) -> tuple[Sequence[int], int]:
        """Returns which of `among`, of `count` members, share batch statistics with this host, and of how many."""
        return among, count

    def weights(
        self, board: Board, ranks: Sequence[int], devices: int, here: StepTotals, everywhere: StepTotals
    ) -> dict[int, float] | None:
        """Returns by rank what its gradient counts when this host's owners add up; None: all are added as they are."""
        return weights_by_rank(board, ranks, devices, here.counted) if here.counted else None

    def touched(self, here: torch.Tensor, everywhere: torch.Tensor) -> torch.Tensor:
        """Returns by slot whether it is updated, of those that have gradients here and on any host."""
        return everywhere

    def settle(self) -> None:
        """Returns when all hosts have the same parameters, as they do after every step."""

    def share(self, index: int, count: int) -> BatchShare:
        """Returns the share of this host's `index`-th of `count` members."""
        return BatchShare(index, count)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all hosts of a few numbers."""
        return values

    def sum_in_call(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the same in what is no step."""
        return values

    def begin_call(self, kind: Kind) -> None:
        """Returns when all hosts have begun a call of this kind, which is no step."""

    def meet(self) -> None:
        """Returns when what this host's owners have sent is back, summed over all hosts."""

    def gradient(self, step: DecidedStep, arena: ModelArena, slot: Slot) -> torch.Tensor:
        """Returns the gradient of a slot, summed over all replicas."""
        parts = [arena.gradient(rank, slot) for rank in step.members.ranks]
        if step.weights is not None:
            parts = [part * step.weights[rank] for part, rank in zip(parts, step.members.ranks, strict=True)]
        return torch.stack(parts).sum(0)


class BetweenHosts(OneHost):
    """Sends this owner's shard to the owners of the same shard elsewhere, bucket by bucket."""

    sums_gradients = True

    def __init__(self, together: Together, links: Links, devices: int = 1) -> None:
        """`devices`: that a replica is cut over."""
        self._devices = devices
        self.number, self.count = links.host, links.hosts
        self.bucket_bytes = BUCKET_BYTES * together.board.replicas
        self.landed = self._landed_slot
        self._together = together
        self._links, self._others = links, OtherHosts(together, links)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-hosts")
        self._sending: Future[None] | None = None
        self._op = 0
        self._waiting_for: list[set[int]] = []  # by bucket: slots whose gradients have not landed yet
        self._landed = 0
        self._counts = True  # whether the loss may be (sum, count): nobody knows before the first step

    def open(self, arena: ModelArena, owner: Owner, buffers: Sequence[torch.Tensor]) -> None:
        self._arena = arena
        self._owner = owner

    def share(self, index: int, count: int) -> BatchShare:
        return BatchShare(self.number * count + index, self.count * count)

    def weights(
        self, board: Board, ranks: Sequence[int], devices: int, here: StepTotals, everywhere: StepTotals
    ) -> dict[int, float] | None:
        return None  # they were weighed before they were sent

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return self._links.sum(values)

    def sum_in_call(self, values: torch.Tensor) -> torch.Tensor:
        return self._links.sum_in_call(values)

    def begin_call(self, kind: Kind) -> None:
        self._others.begin(kind)

    def meet(self) -> None:
        self._together.meet(Kind.UPDATE, Phase.AWAITING_HOSTS)

    def gradient(self, step: DecidedStep, arena: ModelArena, slot: Slot) -> torch.Tensor:
        return arena.summed(slot).clone()

    def begin(self, members: Members, number: int) -> None:
        self._op = members.op
        self._landed = 0
        slots_of = [[piece.slot for piece in chunk.pieces] for chunk in self._arena.layout.chunks]
        buckets = len(self._owner.buckets(members.first))
        self._waiting_for = [set() for _ in range(buckets)]
        for rank in members.ranks:
            for index, bucket in enumerate(self._owner.buckets(rank)):
                for chunk in bucket:
                    self._waiting_for[index].update(slots_of[chunk])
        self._report()
        self._sending = self._thread.submit(self._send, members)

    def _landed_slot(self, slot: int) -> None:
        """The gradient of `slot` is complete in this replica's buffer."""
        for waiting in self._waiting_for[self._landed :]:
            waiting.discard(slot)
        while self._landed < len(self._waiting_for) and not self._waiting_for[self._landed]:
            self._landed += 1
        self._report()

    def computed(self, members: Members, number: int) -> None:
        # Backward is over: whatever has not landed is zero.
        self._landed = len(self._waiting_for)
        self._report()

    def decided(self, step: DecidedStep) -> None:
        assert self._sending is not None
        board, row = self._together.board, self._together.replica
        board.enter(row, Phase.AWAITING_HOSTS)
        while not wait([self._sending], _LOOK_AT_HOSTS_EVERY_S).done:
            self._others.look()
        self._sending.result()
        board.enter(row, Phase.UPDATING)

    def closed(self) -> None:
        self._links.commit()

    def _report(self) -> None:
        self._together.board.set(self._together.replica, Word.LANDED, self._op << _BUCKET_BITS | self._landed)

    def _send(self, members: Members) -> None:
        weights: dict[int, float] | None = None
        for index, bucket in enumerate(self._owner.buckets(self._together.replica)):
            self._await_bucket(members, index)
            if index == 0 and self._counts:
                weights = self._weights(members)
            for first, last in self._runs(bucket):
                self._send_run(members, first, last, weights)

    def _weights(self, members: Members) -> dict[int, float] | None:
        """Returns by rank what its gradient counts in the mean over all hosts; None: what they are."""
        board = self._together.board
        counts = [board.get_float(rank, Word.COUNT) for rank in members.ranks]
        counted = [count for count in counts if count >= 0]
        here = torch.tensor([sum(counted), len(counted), counts.count(OVER_SAMPLES)], dtype=torch.float64)
        total, sums, means = self._links.sum_in_turn(here).tolist()
        self._counts = sums > 0 or not means
        if not sums or not total:  # of nothing there is no mean, which is said when all have arrived
            return None
        return weights_by_rank(board, members.ranks, self._devices, total)

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

    def _send_run(self, members: Members, first: int, last: int, weights: dict[int, float] | None) -> None:
        chunks = self._arena.layout.chunks
        dtype = chunks[first].dtype
        for number in range(first, last + 1):  # by chunk: each is still in the cache when it is added to
            chunk = chunks[number]
            ranks = self._with_gradients(members, chunk)
            parts = [self._arena.chunk_of(self._arena.gradients[rank], chunk) for rank in ranks]
            counts = [weights[rank] for rank in ranks] if weights is not None else None
            sum_into(self._arena.chunk_of(self._arena.sums, chunk), parts, counts)
        run = self._arena.sums[chunks[first].start : chunks[last].stop].view(dtype)
        self._links.sum_values(first, run)

    def _with_gradients(self, members: Members, chunk: Chunk) -> Sequence[int]:
        """Returns whose buffers have something of a chunk."""
        if self._devices == 1:
            return members.ranks
        marks = {rank: self._arena.touched[rank].tolist() for rank in members.ranks}
        return self._owner.filled(chunk, marks)


def weights_by_rank(board: Board, ranks: Sequence[int], devices: int, total: float) -> dict[int, float]:
    """Returns by rank what its gradient counts in the mean over that total; one device of a replica knows."""
    units: dict[int, float] = {}
    for rank in ranks:
        units[rank // devices] = max(units.get(rank // devices, 0.0), board.get_float(rank, Word.UNIT))
    return {rank: units[rank // devices] / total for rank in ranks}
