"""`barrier`, `mean`, `gather`, `broadcast`: the odd thing that a script does together, beside its training.

All four are one exchange: every replica gives some bytes, and gets those of all, in their order. It is an op like a
step or a save, so all replicas must make the same calls in the same order, and a death is survived:

    post the size ──▶ all have: the first member makes shared memory for all ──▶ write one's part ──▶ arrive

Who dies before it has arrived has given nothing, and the others try again without it. Who dies later has given, and
what it gave is in memory that the others hold. Between hosts everybody adds up zeros and what its own host gave, and
all hosts decide that they have got it, as with a step.

Values are numbers, texts, lists and dicts, with tensors anywhere in them; they travel as msgpack, never as pickle. In
one plain process they make the same journey, so that a script meets no surprise later.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import torch
from torch import nn

from paceline.errors import InvalidInput, ReplicaDied, StrategyError
from paceline.exchange.board import COLLECTIVE_BITS, Board
from paceline.exchange.members import Members
from paceline.exchange.together import Together
from paceline.exchange.words import HostWord, Kind, Phase, Word
from paceline.memory.arena import Arena
from paceline.mirrored.between_hosts import BetweenHosts
from paceline.mirrored.link_maker import LinkMaker
from paceline.mirrored.one_host import OneHost
from paceline.mirrored.opening import find_others
from paceline.run_place import Place, find_place

_TENSOR = 1  # the kind of msgpack extension that is a tensor


def barrier() -> None:
    """Return when every replica has called this."""
    _exchange(Kind.BARRIER, b"")


def mean(value: Any) -> Any:
    """The mean over all replicas of a number, a tensor, or a dict of them; every replica gets the same bits.

    A tensor keeps its type, unless that has whole numbers only; a number becomes a float.
    """
    return _mean([_decode(given) for given in _exchange(Kind.MEAN, _encode(value))], value, "value")


def gather(value: Any) -> list[Any]:
    """The values of all replicas, in the order of their ranks. Tensors come back in main memory, tuples as lists."""
    return [_decode(given) for given in _exchange(Kind.GATHER, _encode(value))]


def broadcast(value: Any = None) -> Any:
    """The value of the first replica; it does not matter what the others give. Tensors and tuples as in `gather`."""
    first = find_place().rank == 0
    given = _exchange(Kind.BROADCAST, _encode(value) if first else b"")[0]
    if not given:
        raise ReplicaDied("pl.broadcast has nothing to give: replica 0, whose value it is, has ended")
    return _decode(given)


# ── the exchange ─────────────────────────────────────────────────────────────────────────────────────────────


def _exchange(kind: Kind, given: bytes) -> list[bytes]:
    """What every replica gives, in the order of their ranks."""
    place = find_place()
    if place.world == 1:
        return [given]
    if place.strategy.on_servers:
        raise StrategyError(
            "servers",
            place.strategy.server_processes,
            f"{kind.words.removeprefix('calls ')} is for replicas that make every step together, and on servers each "
            "makes steps of its own; use trainer.evaluate, or leave out --servers",
        )
    if place.joins and place.board is not None and not Board(place.board).host_get(HostWord.JOIN_AT):
        raise ReplicaDied(
            f"host {place.host} has come to a run in progress, and nobody can tell it what the others have got from "
            f"the earlier calls of its script: a script with {kind.words.removeprefix('calls ')} cannot be joined"
        )
    if place.restarted:
        raise ReplicaDied(
            f"replica {place.replica} was started again, and nobody can tell it what the others have got from the "
            f"earlier calls of its script: with {kind.words.removeprefix('calls ')} give --on-failure continue"
        )
    return _others().exchange(kind, given)


@functools.cache
def _others() -> _Others:
    """Those to exchange with; found at the first call, and kept, since a process has one place in one run."""
    atexit.register(_others.cache_clear)  # later, threads of torch's links would outlive what they use
    return _Others(find_place())


class _Others:
    """This process among those that run the same script."""

    def __init__(self, place: Place) -> None:
        self._devices = place.strategy.devices
        place, self._together, links = find_others(nn.Module(), place, purpose="calls")
        self._together.board.announce(place.row)
        self._together.board.host_set(HostWord.CALLED, 1)
        self._rows = place.rows
        self._hosts = _HostsOfCalls(self._together, links, self._tell) if links is not None else OneHost()

    def exchange(self, kind: Kind, given: bytes) -> list[bytes]:
        """What every replica gives; of one that is cut, what its first device does."""

        def one_try(members: Members) -> dict[int, bytes]:
            found = self._on_host(members, kind, given)
            if self._hosts.several:
                self._hosts.enter(members)
                found = self._between_hosts(found)
                self._hosts.decide(members)
            return found

        found = self._together.attempt(one_try)
        self._together.board.enter(self._together.replica, Phase.BETWEEN)
        return [found[rank] for rank in sorted(found) if rank % self._devices == 0]

    def _on_host(self, members: Members, kind: Kind, given: bytes) -> dict[int, bytes]:
        """By row."""
        board, me = self._together.board, members.replica
        board.work_on(members, kind, Phase.BETWEEN)
        board.set(me, Word.GIVES, len(given))
        self._post(members, 0, members.ranks)
        sizes = [board.get(rank, Word.GIVES) for rank in members.ranks]
        if not any(sizes):
            self._together.arrive(members, Phase.AWAITING_OTHERS)
            return dict.fromkeys(members.ranks, b"")
        arena = self._memory(members, sum(sizes))
        parts = {
            rank: arena.view(stop - size, torch.uint8, [size]).numpy()
            for rank, size, stop in zip(members.ranks, sizes, accumulate(sizes), strict=True)
        }
        parts[me].data[:] = given
        self._together.arrive(members, Phase.AWAITING_OTHERS)
        return {rank: part.tobytes() for rank, part in parts.items()}

    def _post(self, members: Members, number: int, awaited: Sequence[int]) -> None:
        """Say that this replica has come to `number`, and wait for the others."""
        board = self._together.board
        board.set(members.replica, Word.POSTED, members.tag << COLLECTIVE_BITS | number)
        board.await_posts(members, awaited, number, self._together.timeout_s, Phase.AWAITING_OTHERS)

    def _memory(self, members: Members, size: int) -> Arena:
        """Shared memory of this one try, made by the first member."""
        board, first = self._together.board, members.ranks[0]
        if first == members.replica:
            arena = Arena.create(size, f"what {len(members.ranks)} replicas exchange")
            board.set(first, Word.SEGMENT, arena.descriptor)
        self._post(members, 1, [first])
        if first != members.replica:
            arena = self._together.attach(first, board.get(first, Word.PID), board.get(first, Word.SEGMENT))
        return arena

    def _tell(self, members: Members, number: int, data: bytes) -> bytes:
        """What the first member has as `data`; `number` and the next are posted."""
        board, first = self._together.board, members.first
        if first == members.replica:
            arena = Arena.create(max(1, len(data)), "what the first member has heard from other hosts")
            arena.view(0, torch.uint8, [len(data)]).numpy().data[:] = data
            board.set(first, Word.SEGMENT, arena.descriptor)
            board.set(first, Word.GIVES, len(data))
        self._post(members, number, [first])
        if first != members.replica:
            arena = self._together.attach(first, board.get(first, Word.PID), board.get(first, Word.SEGMENT))
            data = arena.view(0, torch.uint8, [board.get(first, Word.GIVES)]).numpy().tobytes()
        self._post(members, number + 1, members.ranks)  # until all have it
        return data

    def _between_hosts(self, found: Mapping[int, bytes]) -> dict[int, bytes]:
        """By rank, from what this host's rows gave."""
        hosts = self._hosts
        first = hosts.number * self._rows
        sizes = torch.zeros(hosts.most * self._rows, dtype=torch.int64)
        for row, given in found.items():
            sizes[first + row] = 1 + len(given)  # 0: nobody is left in that row
        lengths = [size - 1 for size in hosts.sum(sizes).tolist()]
        stops = list(accumulate(max(0, length) for length in lengths))
        everything = torch.zeros(stops[-1], dtype=torch.uint8)
        for row, given in found.items():
            everything.numpy().data[stops[first + row] - len(given) : stops[first + row]] = given
        flat = hosts.sum(everything).numpy().tobytes() if stops[-1] else b""
        pairs = enumerate(zip(stops, lengths, strict=True))
        return {rank: flat[stop - length : stop] for rank, (stop, length) in pairs if length >= 0}


class _HostsOfCalls(BetweenHosts):
    """The other hosts, for calls that have no model, and so no shared memory but what a call makes."""

    def __init__(self, together: Together, links: LinkMaker, tell: Callable[[Members, int, bytes], bytes]) -> None:
        """`tell` has all members of this host know what the first has."""
        super().__init__(together, links, "fp32")  # sums of calls are never coded
        self._tell, self._told, self._told_in = tell, 0, 0

    def _as_the_first_has_it(self, total: torch.Tensor, members: Members) -> torch.Tensor:
        if self._told_in != members.tag:
            self._told_in, self._told = members.tag, 0
        self._told += 1
        data = self._tell(members, 2 * self._told, total.view(torch.uint8).numpy().tobytes())
        return torch.frombuffer(bytearray(data), dtype=total.dtype).view(total.shape)


# ── values as bytes ──────────────────────────────────────────────────────────────────────────────────────────


def _encode(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(_packed(value))
    except (OverflowError, ValueError) as error:
        raise InvalidInput("value", type(value).__name__, f"it cannot be exchanged ({error})") from error


def _decode(given: bytes) -> Any:
    return msgspec.msgpack.Decoder(ext_hook=_tensor).decode(given)


def _packed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise InvalidInput("value", f"a {value.layout} tensor", "give dense tensors")
        flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes()
        words = (str(value.dtype).removeprefix("torch."), tuple(value.shape), data)
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(words))
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, (list, tuple)):
        return [_packed(entry) for entry in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _packed(entry) for key, entry in value.items()}
    raise InvalidInput(
        "value", type(value).__name__, "give numbers, texts, tensors, lists, or dicts with texts as keys"
    )


def _tensor(kind: int, data: memoryview) -> torch.Tensor:
    assert kind == _TENSOR
    name, shape, values = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], bytes])
    dtype = getattr(torch, name)
    return torch.frombuffer(bytearray(values), dtype=dtype).view(shape) if values else torch.empty(shape, dtype=dtype)


def _mean(values: Sequence[Any], own: Any, name: str) -> Any:
    """`own`: this replica's value, `name`: how a sentence calls it."""
    described = [_description(value) for value in values]
    for rank, found in enumerate(described):
        if found != described[0]:
            raise InvalidInput(name, found, f"replica {rank} has that and the first {described[0]}; give the same kind")
    if isinstance(own, torch.Tensor):
        wide = torch.complex128 if own.is_complex() else torch.float64
        total = torch.stack([value.to(wide) for value in values]).sum(0) / len(values)
        exact = own.is_floating_point() or own.is_complex()
        return total.to(own.device, own.dtype if exact else torch.get_default_dtype())
    if isinstance(own, dict):
        return {key: _mean([value[key] for value in values], own[key], f"{name}[{key!r}]") for key in own}
    if isinstance(own, (int, float)):
        return sum(values) / len(values)
    raise InvalidInput(name, type(own).__name__, "there is no mean of it; give a number, a tensor, or a dict of them")


def _description(value: Any) -> str:
    """What must be the same in all replicas to have a mean."""
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, dict):
        return f"a dict of {', '.join(sorted(value))}"
    return "a number" if isinstance(value, (int, float)) else type(value).__name__
