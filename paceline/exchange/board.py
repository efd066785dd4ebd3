"""The board: the shared words by which the replicas of one host agree.

A small shared-memory segment, one row a replica. Every word has exactly one writer at a time (its replica, the
first member of a step, or the supervisor), so no locks are needed: aligned 8-byte words are written and read whole.

    word 0 … 63          of the host: membership epoch, stop request …
    word 64 + 64·r …     row of replica r: alive, what it works on, where it has arrived …
    the last 1024 words  one a host of the run: how many of its replicas take part (`host_views`)

An *op* is one thing all replicas do together (a step, an evaluation, a save), numbered in program order. The
*membership epoch* changes whenever a replica dies or joins. A replica that tries an op under an epoch writes the
pair as one word, its *tag*. From these few stable facts all survivors draw the same conclusion about a death,
without talking to one another:

- a member that died after its tag arrived has done its part: the op goes on with what it left in shared memory;
- a member that died before has not, and never will: everybody tries the op again under the new epoch.

The supervisor is the only one that declares deaths: it has waited for the process, so a dead replica cannot write
any more. `words` lists what is on the board. Neither module imports torch, so that the supervisor stays light.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence

from paceline.errors import Stalled
from paceline.exchange.members import EPOCH_BITS, MemberLost, Members, OpGivenUp
from paceline.exchange.words import MOST_ARENAS, ROW_WORDS, HostWord, Kind, Phase, Word
from paceline.memory import segment

BOARD_BYTES = 1 << 20
MOST_HOSTS = 1024
_ROWS_BYTES = BOARD_BYTES - 8 * MOST_HOSTS
MOST_REPLICAS = _ROWS_BYTES // 8 // ROW_WORDS - 1
MOST_TEXT = 256  # bytes

COLLECTIVE_BITS = 16

SPIN_S = 0.001  # how long a wait burns its core before it begins to sleep
OWN_CORE_SPIN_S = 0.02  # the same where every replica has a core of its own: nobody else wants it
LONGEST_SLEEP_S = 0.001


def called(rank: int, devices: int) -> str:
    """
    >>> called(3, 1), called(3, 2)
    ('replica 3', 'device 1 of replica 1')
    """
    return f"replica {rank}" if devices < 2 else f"device {rank % devices} of replica {rank // devices}"


def other_call(one: str, does: Kind, other: str, other_does: Kind) -> Stalled:
    """What is wrong when two processes that run the same script make different calls."""
    return Stalled(
        f"{one} {does.words} while {other} {other_does.words}: every replica must make the same trainer calls in the "
        "same order"
    )


class Board:
    """One host's shared words. All replicas and the supervisor map the same segment."""

    def __init__(self, descriptor: int, only_row: int | None = None) -> None:
        """`only_row`: for a replica that shares memory with nobody, such as one on a GPU, the board is this one row,
        and it is replica 0 of 1."""
        self.descriptor = descriptor
        self._only_row = only_row
        self._first = ROW_WORDS * (1 + (only_row or 0))
        self._map = mmap.mmap(descriptor, BOARD_BYTES)
        self._ints = memoryview(self._map).cast("q")
        self._floats = memoryview(self._map).cast("d")
        # What the thread that this is of does first where it would wait for others; returns whether there was something
        # to do.
        self.meanwhile: Callable[[], bool] = lambda: False

    @classmethod
    def create(cls, replicas: int, *, supervised: bool) -> Board:
        """A fresh board. Anonymous memory: it vanishes with the last process that holds it, whatever happens."""
        board = cls(segment.make("board", BOARD_BYTES))
        board.host_set(HostWord.REPLICAS, replicas)
        board.host_set(HostWord.SUPERVISED, int(supervised))
        for rank in range(replicas):
            board.set(rank, Word.INCARNATION, 1)
            board.set(rank, Word.ADMITTED, 1)
        return board

    # ── words ────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, rank: int, word: int) -> int:
        return self._ints[self._first + rank * ROW_WORDS + word]

    def set(self, rank: int, word: int, value: int) -> None:
        self._ints[self._first + rank * ROW_WORDS + word] = value

    def get_float(self, rank: int, word: int) -> float:
        return self._floats[self._first + rank * ROW_WORDS + word]

    def set_float(self, rank: int, word: int, value: float) -> None:
        self._floats[self._first + rank * ROW_WORDS + word] = value

    def host_get(self, word: int) -> int:
        return self._ints[word]

    def host_set(self, word: int, value: int) -> None:
        self._ints[word] = value

    def read_text(self, word: int) -> str:
        return self._map[8 * word : 8 * word + MOST_TEXT].rstrip(b"\0").decode()

    def write_text(self, word: int, text: str) -> None:
        self._map[8 * word : 8 * word + MOST_TEXT] = text.encode()[:MOST_TEXT].ljust(MOST_TEXT, b"\0")

    def members_on(self, host: int) -> int:
        """How many replicas of a host take part, in the newest view."""
        return self._ints[_ROWS_BYTES // 8 + host]

    def set_members_on(self, host: int, count: int) -> None:
        self._ints[_ROWS_BYTES // 8 + host] = count

    @property
    def replicas(self) -> int:
        return self.host_get(HostWord.REPLICAS) if self._only_row is None else 1

    def alive(self, rank: int) -> bool:
        """Whether the process that was admitted in this row still runs."""
        return self.get(rank, Word.INCARNATION) == self.get(rank, Word.ADMITTED)

    def announce(self, rank: int) -> None:
        """This process now runs in row `rank`: whatever an earlier process counted there is over."""
        if self.get(rank, Word.PID) != os.getpid():
            self.set(rank, Word.PID, os.getpid())
            for word in (Word.OP, Word.ARENAS, Word.ASKED, Word.ENTERED):
                self.set(rank, word, 0)
        self.enter(rank, Phase.STARTING)

    def begin_step(self, rank: int, step: int) -> None:
        """`rank` works on this step of the run; what was made before the first of anybody, an earlier run has made."""
        if not any(self.get(other, Word.STEP) for other in range(self.replicas)):
            self.host_set(HostWord.RESUMED_AT, step)
        self.set(rank, Word.STEP, step)

    def end_step(self, rank: int, times_ns: tuple[int, int, int], loss: float, seen: int, steps: int) -> None:
        """`rank` is done with a step: how long it computed, waited and updated, and what is known of the run then."""
        for word, value in zip((Word.COMPUTE_NS, Word.WAIT_NS, Word.UPDATE_NS), times_ns, strict=True):
            self.set(rank, word, value)
        self.set_float(rank, Word.MEAN_LOSS, loss)
        self.set(rank, Word.SAMPLES_SEEN, seen)
        self.set(rank, Word.STEP, steps)
        self.enter(rank, Phase.BETWEEN)

    def next_op(self, rank: int) -> int:
        """Number of the op that `rank` begins now. All run the same script, so all count alike."""
        return self._count(rank, Word.OP)

    def next_question(self, rank: int) -> int:
        """Number of the question that `rank` asks its predictor now."""
        return self._count(rank, Word.ASKED)

    def next_arena(self, rank: int) -> int:
        """Number of the arena that `rank` is about to share."""
        return self._count(rank, Word.ARENAS)

    def _count(self, rank: int, word: Word) -> int:
        self.set(rank, word, self.get(rank, word) + 1)
        return self.get(rank, word)

    def hold_arena(self, rank: int, arena: int, descriptor: int) -> None:
        """Announce that `rank` holds this arena open, so that others can open it too."""
        self.set(rank, Word.DESCRIPTOR + arena % MOST_ARENAS, arena << 32 | descriptor)

    def arena_holder(self, arena: int) -> tuple[int, int, int] | None:
        """A living replica that holds the arena: rank, process, descriptor."""
        for rank in range(self.replicas):
            held = self.get(rank, Word.DESCRIPTOR + arena % MOST_ARENAS)
            if self.alive(rank) and held >> 32 == arena:
                return rank, self.get(rank, Word.PID), held & 0xFFFF_FFFF
        return None

    # ── membership ───────────────────────────────────────────────────────────────────────────────────────

    def members(self, replica: int, op: int) -> Members:
        """One consistent look at who takes part in `op`."""
        while True:
            before = self.host_get(HostWord.EPOCH)
            ranks = tuple(
                rank for rank in range(self.replicas) if self.alive(rank) and self.get(rank, Word.ADMIT_AT) <= op
            )
            if before % 2 == 0 and before == self.host_get(HostWord.EPOCH):
                return Members(op, before, ranks, replica)
            os.sched_yield()

    def declare_ended(self, rank: int) -> None:
        """Supervisor only, after it has waited for the process."""
        self._next_incarnation(rank)

    def declare_started_again(self, rank: int) -> int:
        """Supervisor only: a new process will take this row. It counts once the first member has admitted it."""
        return self._next_incarnation(rank)

    def _next_incarnation(self, rank: int) -> int:
        incarnation = self.get(rank, Word.INCARNATION) + 1
        self.host_set(HostWord.EPOCH, self.host_get(HostWord.EPOCH) + 1)
        self.set(rank, Word.INCARNATION, incarnation)
        self.host_set(HostWord.EPOCH, self.host_get(HostWord.EPOCH) + 1)
        return incarnation

    def any_joining(self, first: int, op: int) -> bool:
        """Whether notes should be written for one that was started again: it is ready to take part, or an earlier
        try of this op has admitted it. Not while one that was admitted before is still reading its own."""
        reading = admitted = False
        for rank in range(self.replicas):
            if self.alive(rank) and self.get(rank, Word.JOINING):
                admitted |= self.get(rank, Word.ADMIT_AT) == op + 1
                reading |= self.get(rank, Word.ADMIT_AT) <= op
        return not reading and (admitted or any(self._is_joining(rank, first) for rank in range(self.replicas)))

    def _is_joining(self, rank: int, first: int) -> bool:
        """Ready, and at the same trainer of the script as the first member."""
        joining = self.get(rank, Word.JOINING)
        ready = joining == self.get(rank, Word.INCARNATION) != self.get(rank, Word.ADMITTED)
        return ready and self.get(rank, Word.ARENAS) == self.get(first, Word.ARENAS)

    def admit_joining(self, first: int, op: int) -> None:
        """First member only, before it arrives at `op`: whoever is ready takes part from the next op on.

        Everybody reads these words after `op` has closed, so all see the same members of the next one.
        """
        for rank in range(self.replicas):
            if self._is_joining(rank, first):
                self.set(rank, Word.ADMIT_AT, op + 1)
                self.set(rank, Word.ADMITTED, self.get(rank, Word.JOINING))

    # ── phases and waits ─────────────────────────────────────────────────────────────────────────────────

    def enter(self, rank: int, phase: Phase) -> None:
        row = self._first + rank * ROW_WORDS
        self._ints[row + Word.PHASE] = phase
        self._ints[row + Word.SINCE_NS] = time.monotonic_ns()

    def wait(
        self,
        rank: int,
        phase: Phase,
        ready: Callable[[], bool],
        timeout_s: float,
        rest: Callable[[], None] | None = None,
    ) -> None:
        """Wait until `ready()`: spin for a moment, giving way to other processes, then sleep between looks.

        A sleep ends late by up to a millisecond, which is a lot of a short step, and there are several waits in one.

        `ready` may raise `MemberLost` to end the wait. `rest` is called between looks instead: where a thread of this
        process brings what is waited for, spinning would keep it from that.
        """
        if ready():
            return
        while self.meanwhile():
            if ready():
                return
        before = Phase(self.get(rank, Word.PHASE))
        self.enter(rank, phase)
        start = time.monotonic()
        spin_s = OWN_CORE_SPIN_S if self.replicas <= self.host_get(HostWord.CORES) else SPIN_S
        sleep_s = 0.00005
        while not ready():
            waited_s = time.monotonic() - start
            if rest is not None:
                rest()
            elif waited_s < spin_s:
                os.sched_yield()
                continue
            else:
                time.sleep(sleep_s)
                sleep_s = min(sleep_s * 1.3, LONGEST_SLEEP_S)
            if waited_s > timeout_s:
                raise Stalled(f"{self.called(rank)} gave up after {timeout_s:g} s: {self.who_waits()}")
        self.enter(rank, before)

    def work_on(self, members: Members, kind: Kind, phase: Phase) -> None:
        """Announce a try of an op."""
        self.set(members.replica, Word.KIND, members.op << EPOCH_BITS | kind)
        self.set(members.replica, Word.WORKING, members.tag)
        self.enter(members.replica, phase)

    def arrive(self, members: Members) -> None:
        """Announce that this replica's part of the try is complete."""
        self.set(members.replica, Word.ARRIVED, members.tag)

    def await_arrivals(self, members: Members, phase: Phase, timeout_s: float) -> None:
        """Until every member has arrived at this try of this op; `MemberLost` if one never will."""
        self._await(members, members.ranks, Word.ARRIVED, members.tag, phase, timeout_s)

    def await_posts(
        self,
        members: Members,
        among: Sequence[int],
        number: int,
        timeout_s: float,
        phase: Phase = Phase.AWAITING_STATISTICS,
    ) -> None:
        """Until everybody in `among` has posted contribution `number` of this try of this op."""
        self._await(members, among, Word.POSTED, members.tag << COLLECTIVE_BITS | number, phase, timeout_s)

    def _await(
        self, members: Members, among: Sequence[int], word: Word, wanted: int, phase: Phase, timeout_s: float
    ) -> None:
        pending = list(among)

        def ready() -> bool:
            pending[:] = [other for other in pending if not self._reached(other, members, word, wanted)]
            if pending:
                self.check_view(members)
            return not pending

        self.wait(members.replica, phase, ready, timeout_s)

    def _reached(self, other: int, members: Members, word: int, wanted: int) -> bool:
        # The order of the looks matters: who is seen dead first cannot write afterwards, and whoever wrote the
        # word under a later epoch had announced that epoch before.
        alive = self.alive(other)
        reached = self.get(other, word) >= wanted
        working = self.get(other, Word.WORKING)
        if working >> EPOCH_BITS == members.op and working > members.tag:
            raise MemberLost
        self._check_kind(other, members)
        if not reached and not alive:
            raise MemberLost
        # It may be at a later op by now, and have given up that one too: who is past an op has not arrived at it alone.
        if not reached and self.get(other, Word.GAVE_UP) >= members.op:
            raise OpGivenUp(other)
        return reached

    def check_view(self, members: Members) -> None:
        """Raises `MemberLost` if other hosts take part by now than in this try."""
        if members.view is not None and self.host_get(HostWord.VIEW) != members.epoch:
            raise MemberLost

    def await_completions(self, members: Members, timeout_s: float) -> None:
        """Until every member has all that comes from other hosts."""
        self._await(members, members.ranks, Word.COMPLETED, members.tag, Phase.AWAITING_HOSTS, timeout_s)

    def give_up(self, replica: int, op: int, limit_s: float, late_s: float) -> None:
        """Announce that this replica will never arrive at that op."""
        self.set_float(replica, Word.LIMIT, limit_s)
        self.set_float(replica, Word.LATE, late_s)
        self.set(replica, Word.GAVE_UP, op)

    def _check_kind(self, other: int, members: Members) -> None:
        """Replicas run the same script; one that makes another call now would wait for the others for ever."""
        mine, theirs = self.get(members.replica, Word.KIND), self.get(other, Word.KIND)
        if theirs != mine and theirs >> EPOCH_BITS == members.op:
            (_, here), (_, there) = self.doing(members.replica), self.doing(other)
            raise other_call(self.called(members.replica), here, self.called(other), there)

    def doing(self, rank: int) -> tuple[int, Kind]:
        """The last op that the process in row `rank` has begun, and of what kind it is."""
        word = self.get(rank, Word.KIND)
        return word >> EPOCH_BITS, Kind(word & (1 << EPOCH_BITS) - 1)

    def called(self, rank: int) -> str:
        """How a sentence names the process in row `rank`."""
        return called(self.host_get(HostWord.FIRST_REPLICA) + rank, self.host_get(HostWord.DEVICES))

    # ── explanations ─────────────────────────────────────────────────────────────────────────────────────

    def who_waits(self) -> str:
        """Who waits for whom, as a sentence: for the display, for time limits, for a hang.

        >>> board = Board.create(2, supervised=False)
        >>> board.enter(0, Phase.AWAITING_GRADIENTS); board.enter(1, Phase.COMPUTING)
        >>> board.who_waits()
        'replica 0 waits for gradients of step 0 (0 s); replica 1 is computing step 0 (0 s)'
        """
        now = time.monotonic_ns()
        says = []
        for rank in range(self.replicas):
            if not self.alive(rank):
                says.append(f"{self.called(rank)} has ended")
                continue
            phase = Phase(self.get(rank, Word.PHASE))
            since_s = (now - self.get(rank, Word.SINCE_NS)) // 1_000_000_000
            of = f"of step {self.get(rank, Word.STEP)}" if phase.is_wait else f"step {self.get(rank, Word.STEP)}"
            says.append(f"{self.called(rank)} {phase.words} {of} ({since_s} s)")
        return "; ".join(says)
