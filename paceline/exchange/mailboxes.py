"""The devices of one cut replica, as one of them sees the others: tensors go back and forth through shared memory.

Devices on other hosts have mailboxes of the same kind (`far_mailboxes.py`), so nobody else need know where they are.

Every ordered pair of devices has a mailbox: a list of descriptors (what lies where), and room for what they describe.
The sender copies a tensor in, writes its descriptor, and goes on; the receiver reads it in place or copies it out, and
counts it as taken. Room is given out from the beginning whenever everything was taken, so that what devices exchange in
turn stays in the cache. A message longer than a piece travels in several. A sender that finds no room takes in what has
been sent to it meanwhile: two devices may send to each other at the same time, however much.

Shapes, types and how images lie travel with the tensors: nobody has to know them in advance.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

from paceline.errors import PacelineError, ReplicaDied
from paceline.exchange.board import Board
from paceline.exchange.members import Members
from paceline.exchange.together import Together
from paceline.exchange.words import Kind, Phase
from paceline.memory import segment
from paceline.memory.arena import Arena
from paceline.memory.channels_last import channels_are_last, empty_in_order, in_order

ROOM_BYTES = 64 << 20  # of a mailbox; memory that is not used is not there
PIECE_BYTES = 8 << 20
DESCRIPTORS = 256
WORDS = 17  # of a descriptor
MOST_DIMS = WORDS - 5
_ALIGN = 64
_HEAD_BYTES = 4096  # the counters: posted by the sender, taken by the receiver, each in a line of the cache of its own
BOX_BYTES = _HEAD_BYTES + DESCRIPTORS * WORDS * 8 + ROOM_BYTES

DTYPES = sorted({found for found in vars(torch).values() if isinstance(found, torch.dtype)}, key=str)
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}


class Outbox(Protocol):
    """Where messages are left for another device."""

    def post(self, part: torch.Tensor, whole: torch.Tensor) -> bool:
        """Leaves a part of a message, and returns True; False if there is no room at the moment."""


class Inbox(Protocol):
    """Where messages of another device arrive."""

    @property
    def arrived(self) -> bool:
        """Returns whether something lies there that was not taken yet."""

    def next(self) -> torch.Tensor | None:
        """Returns the next message that is whole; None if there is none."""

    def take_in(self) -> None:
        """Takes in what has arrived, so that there is room for more."""

    def clear(self) -> None:
        """Throws away what has arrived; nobody may send meanwhile."""


class FarDevices(Protocol):
    """The devices of the same replica that are on other hosts."""

    @property
    def out(self) -> Mapping[int, Outbox]:
        """By device."""

    @property
    def into(self) -> Mapping[int, Inbox]:
        """By device."""

    def lost(self, device: int) -> str | None:
        """Returns who that device is, and why nothing will come from it; None: it may."""

    def rest(self) -> None:
        """Returns when something may have come or gone, or after a moment."""

    def close(self) -> None:
        """Returns when all that was left has gone there."""


class Peers:
    """The devices of one replica, as the device with number `rank` among them sees them: `count` in all."""

    _far: FarDevices | None = None  # those of them that are not on this host

    def __init__(
        self,
        arena: Arena,
        board: Board,
        process: int,
        rank: int,
        count: int,
        timeout_s: float,
        far: FarDevices | None = None,
    ) -> None:
        """`process`: this device's row on the board; those of its replica follow one another."""
        self.rank = rank
        self.count = count
        self._board = board
        self._process = process
        self._timeout_s = timeout_s
        self._arena = arena
        self._far = far
        beyond = far.out if far is not None else {}
        here = [device for device in range(count) if device not in beyond]
        self.here = range(here[0], here[-1] + 1)  # the replica's devices on this host
        self.first_row = process - (rank - self.here.start)  # of those, on the board
        others = [other for other in here if other != rank]
        self._out: dict[int, Outbox] = {other: _Outbox(arena, self._box(rank, other)) for other in others}
        self._in: dict[int, Inbox] = {other: _Inbox(arena, self._box(other, rank)) for other in others}
        if far is not None:
            self._out |= far.out
            self._in |= far.into
        self._told = 0  # words of what the first device has told all
        self.alike = far is None  # replicas decide together; else each for itself

    @classmethod
    def meet(cls, together: Together, rank: int, count: int, far: FarDevices | None = None) -> Peers:
        """Opens the mailboxes, and returns this device's peers. All devices of all replicas of this host call this
        at the same time; each finds those of its own replica."""
        board, process = together.board, together.replica
        number = board.next_arena(process)
        found: list[Arena] = []

        def one_try(members: Members) -> None:
            board.work_on(members, Kind.BUILD, Phase.STARTING)
            if not found:  # else a try before this one has it, and others may have opened that
                if members.first == process and board.arena_holder(number) is None:
                    found.append(Arena.of(segment.make("mailboxes", board.replicas * count * BOX_BYTES)))
                else:
                    found.append(together.attach(*together.await_arena(number, members.first)))
                board.hold_arena(process, number, found[0].descriptor)
            together.arrive(members, Phase.AWAITING_ARENA)

        together.attempt(one_try)
        return cls(found[0], board, process, rank, count, together.timeout_s, far)

    def _row(self, device: int) -> int:
        return self.first_row + device - self.here.start

    def _box(self, source: int, target: int) -> int:
        return (self._row(source) * self.count + target) * BOX_BYTES

    def while_waiting(self, act: Callable[[], bool]) -> None:
        """Has `act` called whenever this process waits for another, until it returns that there is no more to do."""
        self._board.meanwhile = act

    @property
    def is_spread(self) -> bool:
        """Returns whether devices of the replica are on several hosts, as many on each."""
        return self._far is not None

    def hosts_of(self, devices: Iterable[int]) -> list[int]:
        """Returns the hosts that these devices of the replica are on."""
        return sorted({device // len(self.here) for device in devices})

    # ── one to one ───────────────────────────────────────────────────────────────────────────────────────

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Sends a tensor, and returns as soon as it is copied, whether or not it has been received."""
        box = self._out[to]
        for part in in_pieces(tensor):
            if not box.post(part, tensor):
                self._wait(to, partial(self._posted, box, part, tensor))

    def receive(self, source: int) -> torch.Tensor:
        """Returns the next tensor that `source` has sent to this device, and waits for it."""
        box = self._in[source]
        while (tensor := box.next()) is None:
            self._wait(source, lambda: box.arrived)
        return tensor

    def _posted(self, box: Outbox, part: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Tries again to leave a part, after taking in whatever has arrived: the other side may be waiting for that."""
        for other in self._in.values():
            other.take_in()
        return box.post(part, tensor)

    def _wait(self, other: int, ready: Callable[[], bool]) -> None:
        def look() -> bool:
            gone = self._gone(other)  # looked at first: who is gone now has sent it before, or never will
            if ready():
                return True
            if gone is not None:
                raise ReplicaDied(f"device {self.rank} waits for {gone}: a cut model needs all its devices")
            return False

        rest = self._far.rest if self._far is not None and other not in self.here else None
        self._board.wait(self._process, Phase.AWAITING_DEVICES, look, self._timeout_s, rest)

    def _gone(self, other: int) -> str | None:
        """Returns who a device is, and why nothing will come from it; None: it may."""
        if self._far is not None and other not in self.here:
            return self._far.lost(other)
        if self._board.alive(self._row(other)):
            return None
        who = f"device {other} of the same replica" if other >= 0 else "device 0 of replica 0"
        return f"{who}, whose process has ended"

    # ── all together ─────────────────────────────────────────────────────────────────────────────────────

    def along(self, ranks: Sequence[int]) -> DeviceGroup:
        """Returns the group of these devices, this one among them, for what they do together."""
        return DeviceGroup(self, tuple(ranks))

    @property
    def everyone(self) -> DeviceGroup:
        """Returns the group of all devices of the replica."""
        return self.along(range(self.count))

    # ── all replicas ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def first(self) -> bool:
        """Returns whether this is the first of those who decide: of all devices on this host, or of its replica's."""
        return self._process == 0 if self.alike else self.rank == 0

    @property
    def first_here(self) -> bool:
        """Returns whether this is the first of those who decide that are on this host, where files are."""
        return self.first or (self._far is not None and self.rank == self.here.start)

    @contextmanager
    def each_replica_by_itself(self) -> Iterator[None]:
        """Has what is decided inside be of this replica alone: others need not come."""
        before, self.alike = self.alike, False
        try:
            yield
        finally:
            self.alike = before

    def tell_all(self, numbers: Sequence[int] | None = None) -> list[int]:
        """Returns, on every device of those that decide together, the numbers that the first of them gives."""
        if not self.alike:
            told = torch.tensor(numbers, dtype=torch.int64) if self.first else None
            return self.everyone.broadcast(told).tolist()
        # Nobody sends to itself, so the first device's mailbox to itself is free. Nothing there is written twice.
        words = self._arena.view(0, torch.int64, [BOX_BYTES // 8])[self._told :]
        if self.first:
            assert numbers is not None
            words[1 : 1 + len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
            words[0] = 1 + len(numbers)  # after what it announces
        elif not words[0]:
            self._wait(-self.first_row, lambda: bool(words[0]))
        length = int(words[0])
        self._told += length
        return words[1:length].tolist()

    def close(self) -> None:
        """Lets go of the memory; nothing may be sent or received afterwards."""
        if self._far is not None:
            self._far.close()
        self._arena.close()


class DeviceGroup:
    """Some devices of a replica that do something together; results are the same bits on all."""

    def __init__(self, peers: Peers, ranks: tuple[int, ...]) -> None:
        self.peers = peers
        self.ranks = ranks
        self.index = ranks.index(peers.rank)
        self.count = len(ranks)
        self._others = [rank for rank in ranks if rank != peers.rank]

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns everybody's tensor, in the order of the devices."""
        for other in self._others:
            self.peers.send(tensor, other)
        return [tensor if rank == self.peers.rank else self.peers.receive(rank) for rank in self.ranks]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum over the group, added up in the order of the devices."""
        if self.count == 1:
            return tensor
        first, second, *others = self.exchange(tensor.detach())
        total = first + second
        for other in others:
            total += other
        return total

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns everybody's tensor side by side along `dim`; they may differ in length there."""
        return torch.cat(self.exchange(tensor.detach()), dim) if self.count > 1 else tensor

    def broadcast(self, tensor: torch.Tensor | None, source: int = 0) -> torch.Tensor:
        """Returns the tensor of the group's `source`-th device; the others give None."""
        if self.index != source:
            return self.peers.receive(self.ranks[source])
        assert tensor is not None
        for other in self._others:
            self.peers.send(tensor, other)
        return tensor


def in_pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the elements of a tensor in a row, as they lie, in pieces as they are left in mailboxes."""
    flat = in_order(tensor.detach()).contiguous().view(-1)
    if flat.nbytes <= PIECE_BYTES:
        return [flat]
    pieces = math.ceil(flat.nbytes / PIECE_BYTES)
    step = -(-max(1, flat.numel()) // pieces)
    return [flat[piece * step : (piece + 1) * step] for piece in range(pieces)]


def described(part: torch.Tensor, whole: torch.Tensor) -> list[int]:
    """Returns what goes with a part of a message: its length, the type, whether channels lie last, how many dims the
    whole has, and which."""
    if whole.dim() > MOST_DIMS or whole.is_quantized:
        raise PacelineError(f"a tensor of {whole.dtype} with {whole.dim()} dims cannot go to another device")
    return [part.numel(), DTYPE_NUMBERS[whole.dtype], int(channels_are_last(whole)), whole.dim(), *whole.shape]


class _Box:
    """One mailbox, of an ordered pair of devices, as it lies in shared memory: counters, descriptors, room."""

    def __init__(self, arena: Arena, offset: int) -> None:
        words = DESCRIPTORS * WORDS
        head = arena.view(offset, torch.int64, [_HEAD_BYTES // 8 + words]).numpy().data
        self._counters = head[: _HEAD_BYTES // 8]
        self._descriptors = head[_HEAD_BYTES // 8 :]
        self._room = arena.view(offset + _HEAD_BYTES + words * 8, torch.uint8, [ROOM_BYTES])

    # One line of the cache each, so that neither side's writing disturbs the other's looking.
    @property
    def posted(self) -> int:
        return self._counters[0]

    @property
    def taken(self) -> int:
        return self._counters[64]


class _Outbox(_Box):
    """A mailbox as its sender sees it: where there is room."""

    def __init__(self, arena: Arena, offset: int) -> None:
        super().__init__(arena, offset)
        self._lying: deque[tuple[int, int, int]] = deque()  # number, start, stop of what may not be taken yet

    def post(self, part: torch.Tensor, whole: torch.Tensor) -> bool:
        number, taken = self.posted, self.taken
        while self._lying and self._lying[0][0] < taken:
            self._lying.popleft()
        if number - taken >= DESCRIPTORS:
            return False
        size = part.nbytes
        start = self._find(size)
        if start is None:
            return False
        if size:
            self._room[start : start + size].view(part.dtype).copy_(part)
        at = number % DESCRIPTORS * WORDS
        words = array(self._descriptors.format, (start, *described(part, whole)))
        self._descriptors[at : at + len(words)] = words
        self._lying.append((number, start, start + size))
        self._counters[0] = number + 1  # after everything it announces
        return True

    def _find(self, size: int) -> int | None:
        """Returns where that many bytes fit in a row, in front of or behind what still lies there; None if nowhere."""
        if not self._lying:
            return 0
        first, last = self._lying[0][1], -(-self._lying[-1][2] // _ALIGN) * _ALIGN
        if self._lying[-1][1] >= first:  # what lies there does not wrap around
            if last + size <= ROOM_BYTES:
                return last
            return 0 if size <= first else None
        return last if last + size <= first else None


class Assembly:
    """Messages that are whole, and one that may be arriving in pieces."""

    def __init__(self) -> None:
        self.whole: deque[torch.Tensor] = deque()
        self._begun: tuple[torch.Tensor, torch.Tensor] | None = None  # one of which pieces are missing; as it lies
        self._filled = 0

    def room(self, length: int, dtype: torch.dtype, last: bool, shape: Sequence[int]) -> torch.Tensor:
        """Returns where the next piece goes, of that many elements, of a message of that shape."""
        if self._begun is None:
            self._begun, self._filled = empty_in_order(shape, dtype, last), 0
        return self._begun[1][self._filled : self._filled + length]

    def filled(self, length: int) -> None:
        """The piece is there."""
        assert self._begun is not None
        whole, _ = self._begun
        self._filled += length
        if self._filled == whole.numel():
            self.whole.append(whole)
            self._begun = None

    def clear(self) -> None:
        """Throws everything away."""
        self.whole.clear()
        self._begun = None


class _Inbox(_Box):
    """A mailbox as its receiver sees it."""

    def __init__(self, arena: Arena, offset: int) -> None:
        super().__init__(arena, offset)
        self._messages = Assembly()

    @property
    def arrived(self) -> bool:
        return self.posted > self.taken

    def next(self) -> torch.Tensor | None:
        if not self._messages.whole and self.arrived:
            self._collect()
        return self._messages.whole.popleft() if self._messages.whole else None

    def take_in(self) -> None:
        while self.arrived:
            self._collect()

    def clear(self) -> None:
        self.take_in()
        self._messages.clear()

    def _collect(self) -> None:
        """Copies out the piece that has arrived first."""
        number = self.taken
        at = number % DESCRIPTORS * WORDS
        start, length, kind, last, dims, *shape = self._descriptors[at : at + WORDS].tolist()
        dtype = DTYPES[kind]
        place = self._messages.room(length, dtype, bool(last), shape[:dims])
        if length:
            place.copy_(self._room[start : start + length * dtype.itemsize].view(dtype))
        self._counters[64] = number + 1
        self._messages.filled(length)
