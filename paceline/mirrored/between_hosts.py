"""The other hosts of a run, if there are any: gradients go there while backward still runs.

Chunks lie in the order in which backward finishes them, and travel in buckets. As soon as every replica of this
host has finished a bucket, each owner sums its part of it from shared memory and sends it off, in threads of its own:
the link works while the model computes. Several buckets are under way at once, so that one is coded or added up while
the bytes of others cross, in both directions. What comes back, summed over all hosts, lies in the arena's `sums`, and
is applied chunk by chunk as it comes, while the rest is still on its way. Where a host may die and the others go on
(`exchange/host_views.py`), nothing is applied before all of it is back on every host:

    backward     ▓▓▓▓▓▓▓▓▓▓▓┃ all have arrived: the step is decided
    bucket 0        ├ code ┤▒▒▒ there ▒▒▒├ add ┤▒▒▒ back ▒▒▒├ update ┤
    bucket 1              ├ code ┤   ▒▒▒ there ▒▒▒├ add ┤   ▒▒▒ back ▒▒▒├ update ┤

Of a loss that is (sum, count) the gradients are weighed before they are sent, so that a wire of few bits sees those of
the mean, and carries over what it loses in the same measure. By what to weigh them is known as soon as the first bucket
is complete: by then everybody's last forward is over, and has counted.

Of a cut model nothing is sent before backward is over: only then do its devices say which buffers have gradients.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager

import torch

from paceline.errors import ReplicaDied, Stalled
from paceline.exchange.board import Board
from paceline.exchange.links import LOOK_EVERY, LinkLost, Links
from paceline.exchange.members import MemberLost, Members
from paceline.exchange.other_hosts import OtherHosts
from paceline.exchange.sums import SharedSums
from paceline.exchange.together import Together
from paceline.exchange.words import OVER_SAMPLES, Kind, Phase, Word
from paceline.loop.lockstep import BatchShare
from paceline.memory.layout import Chunk, FlatLayout, Slot
from paceline.memory.model_arena import ForHosts, ModelArena
from paceline.mirrored.link_maker import LinkMaker
from paceline.mirrored.link_threads import LinkThreads
from paceline.mirrored.newcomers import bring_state
from paceline.mirrored.one_host import OneHost, weights_by_rank
from paceline.mirrored.owner import Owner, sum_into
from paceline.mirrored.step_parts import DecidedStep
from paceline.mirrored.step_totals import StepTotals
from paceline.mirrored.wire_memory import WireMemory

BUCKET_BYTES = 2 << 20  # of each owner: what is left to do when the last one has come back is short
AT_ONCE = 4  # buckets under way
_BUCKET_BITS = 16
_LOOK_EVERY_S = 0.0003
_LONGEST_END_S = 1.0  # of what is under way when its connections are closed
_LOOK_AT_HOSTS_EVERY_S = LOOK_EVERY.total_seconds()


class BetweenHosts(OneHost):
    """Sends this owner's shard to the owners of the same shard elsewhere, bucket by bucket."""

    sums_gradients = True
    several = True

    def __init__(
        self, together: Together, links: LinkMaker, wire_name: str, devices: int = 1, of: str = "gradient"
    ) -> None:
        """`links` makes those of each view. `devices`: that a replica is cut over. `of`: what is sent."""
        self._devices = devices
        self._memory = WireMemory(wire_name, of)
        self.whole_tensors = self._memory.whole_tensors
        self.number, self.most, self.leads = links.host, links.hosts, links.host == 0
        self.bucket_bytes = BUCKET_BYTES * together.board.replicas
        self.landed = self._landed_slot
        self._together = together
        self._make_links = links
        self._links: Links | None = None  # None: no other host has its like
        self._view = -1  # that they are of
        self._members = Members(0, 0, (), together.replica)
        self._tries_again = True  # whatever is being exchanged, after a link has broken
        self._threads = LinkThreads(1 + AT_ONCE)
        self._sending: Future[None] | None = None  # buckets, as they are complete
        self._sent: list[Future[None]] = []  # buckets, in the order of sending: done when it is back
        self._place_of: dict[int, int] = {}  # in that order, by chunk of this owner
        self._tag = 0
        self._touched: Sequence[int] = ()  # by slot, in the step that is being made
        self._waiting_for: list[set[int]] = []  # by bucket: slots whose gradients have not landed yet
        self._landed = 0
        self._counts = True  # whether the loss may be (sum, count): nobody knows before the first step
        self._closed = False
        atexit.register(_close, weakref.ref(self))  # threads inside Gloo would abort a Python that ends

    def keeps(self, layout: FlatLayout) -> ForHosts:
        owed, bases = self._memory.floats(layout)
        return ForHosts(sums=True, owed_floats=owed, bases_floats=bases)

    def open(self, arena: ModelArena, owner: Owner, sums: SharedSums, buffers: Sequence[torch.Tensor]) -> None:
        self._arena = arena
        self._owner = owner
        self._sums = sums
        self._memory.open(arena)

    def collect(self, *, first: bool) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        if first:  # in a thread, since it takes until all others have sent theirs, and one of them may die before
            self._sent = [self._threads.submit(lambda: found.update(self._memory.collect()))]
            self._await(*self._sent)
            self._together.board.enter(self._together.replica, Phase.SAVING)
        return found

    def take(self, saved: dict[str, torch.Tensor]) -> None:
        view = self._together.coming().view
        hosts = range(self.most) if view is None else view.hosts
        self._memory.take(saved, hosts.index(self.number), len(hosts))

    def bring(self, state: Callable[[], Sequence[torch.Tensor]], *, needs: bool) -> None:
        if self._links is None:
            if needs:
                raise ReplicaDied("no host is left that has the run's state: start it again from a checkpoint")
            return
        parts = [*state(), *self._memory.bases()]
        self._sent = [self._threads.submit(bring_state, self._links, parts, needs=needs)]
        self._await(*self._sent)

    def share(self, members: Members, index: int, count: int) -> BatchShare:
        view = members.view
        if view is None:
            hosts = self._make_links.hosts
            return BatchShare(self.number * count + index, hosts * count)
        return BatchShare(view.before(self.number) // self._devices + index, view.total // self._devices)

    # ── from view to view ────────────────────────────────────────────────────────────────────────────────

    def enter(self, members: Members) -> None:
        self._members = members
        view = members.view
        if members.epoch == self._view or (view is None and self._links is not None):
            return
        self._give_up()
        self._links = self._make_links.open(members)
        self._view = members.epoch
        self._counts = True  # those who are new do not know
        if view is None:
            hosts, own = self._make_links.hosts, len(members.ranks)
            self.count, self.total, self.before = hosts, hosts * own, self.number * own
        else:
            self.count, self.total, self.before = len(view.hosts), view.total, view.before(self.number)
            self.leads = view.hosts[0] == self.number
        self._memory.connect(self._links)
        if self._links is not None:
            self._others = OtherHosts(self._together, self._links, members)
            self._links.look = self._look

    def _look(self) -> None:
        """While this host waits for others."""
        self._together.board.check_view(self._members)
        if self._links is not None:
            with self._crossing():
                self._others.look()

    def _give_up(self) -> None:
        """Ends whatever is under way in an earlier view."""
        if self._links is not None:
            self._links.abort()
            if self._sending is not None:
                self._threads.let_end([self._sending], _LONGEST_END_S)
            self._threads.let_end(self._sent, _LONGEST_END_S)
            self._sending, self._sent = None, []
        self._links = None

    def _let_end(self) -> None:
        """Returns when nothing of an earlier try is under way."""
        if self._sending is not None:
            wait([self._sending])
        wait(self._sent)
        self._sending, self._sent = None, []

    @contextmanager
    def _crossing(self) -> Iterator[None]:
        """Around whatever waits for other hosts: where their deaths are survived, a broken link means to try again."""
        try:
            yield
        except LinkLost:
            if self._members.view is None or not self._tries_again:
                raise
            raise MemberLost from None

    @contextmanager
    def _not_tried_again(self, what: str) -> Iterator[None]:
        """Around an exchange that nobody can repeat: if a link breaks in it the run ends, with a sentence. Raises
        `LinkLost`."""
        self._tries_again = False
        try:
            yield
        except MemberLost:  # another host has given up the view: it says why
            raise LinkLost(f"host {self.number} was {what} when one of them lost a link: see their output") from None
        finally:
            self._tries_again = True

    def decide(self, members: Members) -> None:
        if members.view is not None:
            self._together.decide(members, self._ask_hosts)

    def _ask_hosts(self) -> None:
        if self._links is not None:
            with self._crossing():
                self._links.sum(torch.zeros(1))

    def _over_hosts(self, values: torch.Tensor, add_up: Callable[[Links], torch.Tensor]) -> torch.Tensor:
        """Returns what `add_up` does of the links; members that have no like on other hosts are told by the first."""
        if self.count == 1:
            return values
        total = torch.zeros_like(values)
        if self._links is not None:
            with self._crossing():
                total = add_up(self._links)
        members = self._members
        return total if len(members.ranks) == members.lanes else self._as_the_first_has_it(total, members)

    def _as_the_first_has_it(self, total: torch.Tensor, members: Members) -> torch.Tensor:
        """Returns what the first member of this host gives as `total`, through its shared memory; all call it."""
        if members.first != members.replica:
            total = torch.zeros_like(total)
        flat, most = total.reshape(-1), max(1, self._arena.scratch_bytes // total.element_size())
        parts = [self._sums.sum(flat[at : at + most], members.ranks) for at in range(0, flat.numel(), most)]
        return torch.cat(parts).view(total.shape) if parts else total

    def weights(
        self, board: Board, ranks: Sequence[int], devices: int, here: StepTotals, everywhere: StepTotals
    ) -> dict[int, float] | None:
        return None  # they were weighed before they were sent

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return self._over_hosts(values, lambda links: links.sum(values))

    def sum_in_call(self, values: torch.Tensor) -> torch.Tensor:
        return self._over_hosts(values, lambda links: links.sum_in_call(values))

    def begin_call(self, kind: Kind) -> None:
        if self._links is not None:
            with self._crossing():
                self._others.begin(kind)

    def meet(self) -> None:
        self._await(*self._sent)
        self._together.meet(Kind.UPDATE, Phase.AWAITING_HOSTS)

    def gradient(self, step: DecidedStep, arena: ModelArena, slot: Slot) -> torch.Tensor:
        return arena.summed(slot).clone()

    def begin(self, members: Members, number: int) -> None:
        self.enter(members)
        self._let_end()
        self._expect_gradients(members)
        self._begin_sending(members)

    def _expect_gradients(self, members: Members) -> None:
        """None of this try has landed yet."""
        self._tag = members.tag
        self._landed = 0
        slots_of = [[piece.slot for piece in chunk.pieces] for chunk in self._arena.layout.chunks]
        buckets = len(self._owner.buckets(members.first))
        self._waiting_for = [set() for _ in range(buckets)]
        for rank in members.ranks[: members.lanes]:
            for index, bucket in enumerate(self._owner.buckets(rank)):
                for chunk in bucket:
                    self._waiting_for[index].update(slots_of[chunk])
        self._report()

    def _begin_sending(self, members: Members) -> None:
        """From now on whatever has landed is sent."""
        self._place_of = {}
        if members.replica in members.ranks[: members.lanes]:
            own = self._owner.buckets(members.replica)
            order = self._order(len(own))
            self._place_of = {chunk: place for place, index in enumerate(order) for chunk in own[index]}
            self._sending = self._threads.submit(self._send, members, own, order, self._sent)

    def _order(self, buckets: int) -> Sequence[int]:
        """Returns in which order so many are sent, the same on all hosts, from 0 on: as they land."""
        return range(buckets)

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

    def agree(self, step: DecidedStep) -> None:
        if self._sending is not None:
            self._await(self._sending)  # all have landed
        if step.members.view is not None:  # what was applied cannot be taken back
            self._await(*self._sent)

    def decided(self, step: DecidedStep) -> None:
        self._touched = step.touched

    def arrived(self, chunk: int) -> None:
        if (place := self._place_of.get(chunk)) is not None:  # else it was a dead owner's, and is all there
            self._await(self._sent[place])
        self._memory.keep_untouched(chunk, self._touched)  # by whoever updates the chunk: its owner may have died

    def _await(self, *futures: Future[None]) -> None:
        board, row = self._together.board, self._together.replica
        for future in futures:
            if not future.done():
                board.enter(row, Phase.AWAITING_HOSTS)
                while not wait([future], _LOOK_AT_HOSTS_EVERY_S).done:
                    self._look()
                board.enter(row, Phase.UPDATING)
            with self._crossing():
                future.result()

    def closed(self) -> None:
        self._await(*self._sent)
        self._memory.commit()

    def close(self) -> None:
        self._closed = True
        if not all(future.done() for future in (self._sending, *self._sent) if future is not None):
            self._give_up()
        self._threads.close()

    def _report(self) -> None:
        self._together.board.set(self._together.replica, Word.LANDED, self._tag << _BUCKET_BITS | self._landed)

    def _send(
        self, members: Members, buckets: Sequence[Sequence[int]], order: Sequence[int], sent: list[Future[None]]
    ) -> None:
        weights: dict[int, float] | None = None
        for index in order:
            self._await_bucket(members, index)
            if index == 0 and self._counts:
                weights = self._weights(members)
            sent.append(self._threads.submit(self._send_bucket, members, buckets[index], weights))

    def _send_bucket(self, members: Members, bucket: Sequence[int], weights: Mapping[int, float] | None) -> None:
        for first, last in self._runs(bucket):
            self._send_run(members, first, last, weights)

    def _weights(self, members: Members) -> dict[int, float] | None:
        """Returns by rank what its gradient counts in the mean over all hosts; None: what they are."""
        board = self._together.board
        counts = [board.get_float(rank, Word.COUNT) for rank in members.ranks]
        counted = [count for count in counts if count >= 0]
        here = torch.tensor([sum(counted), len(counted), counts.count(OVER_SAMPLES)], dtype=torch.float64)
        if self._links is not None:
            here = self._links.sum_in_turn(here)
        total, sums, means = here.tolist()
        self._counts = sums > 0 or not means
        if not sums or not total:  # of nothing there is no mean, which is said when all have arrived
            return None
        return weights_by_rank(board, members.ranks, self._devices, total)

    def _await_bucket(self, members: Members, index: int) -> None:
        """Sleeps between looks: this thread shares its interpreter with backward."""
        wanted = members.tag << _BUCKET_BITS | index + 1
        give_up = time.monotonic() + self._together.timeout_s
        board = self._together.board
        while any(board.get(rank, Word.LANDED) < wanted for rank in members.ranks):
            board.check_view(members)
            if self._closed:
                raise LinkLost("nothing is sent any more: this process ends")
            if time.monotonic() > give_up:
                raise Stalled(f"gradients did not land in {self._together.timeout_s:g} s: {board.who_waits()}")
            time.sleep(_LOOK_EVERY_S)

    def _runs(self, bucket: Sequence[int]) -> list[tuple[int, int]]:
        """Neighbouring chunks of one type, as first and last chunk number: each run is sent as a whole."""
        chunks = self._arena.layout.chunks
        runs: list[tuple[int, int]] = []
        for number in bucket:
            if runs and chunks[runs[-1][1]].dtype == chunks[number].dtype:
                runs[-1] = (runs[-1][0], number)
            else:
                runs.append((number, number))
        return runs

    def _send_run(self, members: Members, first: int, last: int, weights: Mapping[int, float] | None) -> None:
        chunks = self._arena.layout.chunks
        dtype = chunks[first].dtype
        for number in range(first, last + 1):  # by chunk: each is still in the cache when it is added to
            chunk = chunks[number]
            ranks = self._with_gradients(members, chunk)
            parts = [self._arena.chunk_of(self._arena.gradients[rank], chunk) for rank in ranks]
            counts = [weights[rank] for rank in ranks] if weights is not None else None
            sum_into(self._arena.chunk_of(self._arena.sums, chunk), parts, counts)
        run = self._arena.sums[chunks[first].start : chunks[last].stop].view(dtype)
        self._memory.sum(first, run)

    def _with_gradients(self, members: Members, chunk: Chunk) -> Sequence[int]:
        """Returns whose buffers have something of a chunk."""
        if self._devices == 1:
            return members.ranks
        marks = {rank: self._arena.touched[rank].tolist() for rank in members.ranks}
        return self._owner.filled(chunk, marks)


def _close(hosts: weakref.ref[BetweenHosts]) -> None:
    if (found := hosts()) is not None:
        found.close()
