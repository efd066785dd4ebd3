"""One description of a strategy's step: pieces of work, what does them, and what has to be over before.

The simulator runs it (`simulate`), and an explanation reads it: both speak of the same pieces by the same names.

    replica 0   pull ─▶ forward ─▶ backward ─▶ push ─▶ report ─┐
    replica 1   pull ─▶ forward ─▶ backward ─▶ push ─▶ report ─┤  closing: update
                                                               ▼
A *turn* is what one participant (a replica, a device of a cut one) does by itself; the *closing* is what follows when
the rule says that there is enough. With `closes="all"` pieces of different turns may wait for one another, as they do
in collectives and pipelines. With a number the step closes with the first so many turns; whoever is late goes on to its
end, is thrown away, and begins the step that is then open. With "each" every turn has its own closing (async).

A resource does its pieces *in turn*, as a core does, or *shared*, as a link is by all that is under way. Equal ones
that always carry equal parts (the links of servers that hold equal shards) are one resource with `copies`: that is
exact, and makes 500 replicas on 16 servers 500 transfers instead of 8000.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from paceline.errors import InvalidInput

PieceKind = Literal["compute", "exchange", "update", "input", "wait"]
KINDS: tuple[PieceKind, ...] = ("compute", "exchange", "update", "input", "wait")

CLOSING = -1  # whose piece it is, if it comes after the turns
TOGETHER = -2  # if all participants do it together, in their turns


class Resource(msgspec.Struct, frozen=True):
    """Something that does pieces of work; `rate` is in bytes a second, each way of a link being its own resource.

    >>> Resource("servers' link in", copies=16, rate=1e9, shared=True).capacity
    16000000000.0
    """

    name: str  # "replica's core", "host's link out", "servers' link in", "servers' core", "host's memory"
    number: int | None = None  # which one of that name, if there are several
    copies: int = 1
    rate: float | None = None  # of each copy; None: bytes take no time
    shared: bool = False  # fairly among what is under way; else one piece after another

    @property
    def capacity(self) -> float:
        """Bytes a second of all copies together."""
        return math.inf if self.rate is None else self.rate * self.copies


class StepPiece(msgspec.Struct, frozen=True):
    """A piece of work: first its bytes go through what it is on, then its seconds pass.

    Seconds of what is in turn are spent on it. After bytes they are not: the way of a message is long, not its sending.
    """

    name: str
    kind: PieceKind
    of: int = CLOSING  # the participant whose turn it belongs to; its compute times are drawn for it
    on: tuple[int, ...] = ()  # resources, by their place in the description; at most one that works in turn
    seconds: float = 0.0
    bytes: float = 0.0  # over all copies of a resource together
    after: tuple[int, ...] = ()  # pieces, by their place in the description
    turn: int = 0  # which of the participant's turns in this step: each has compute times of its own


class StepDescription(msgspec.Struct, frozen=True):
    """What a step consists of. `check` refuses what could not be run."""

    strategy: str  # in words
    participants: int
    resources: tuple[Resource, ...]
    pieces: tuple[StepPiece, ...]
    closes: int | Literal["all", "each"] = "all"
    bound: int | None = None  # async: how many turns a participant may be ahead of the slowest
    turns_a_step: int = 1  # batches that every participant computes in a step: more than one with local steps

    def check(self) -> StepDescription:
        """Returns the description if it can be run."""
        if self.participants < 1:
            raise InvalidInput("participants", self.participants, "give at least 1")
        if isinstance(self.closes, int) and not 1 <= self.closes <= self.participants:
            raise InvalidInput("accept", self.closes, f"give 1 to {self.participants}, the number of replicas")
        for place, piece in enumerate(self.pieces):
            if piece.kind not in KINDS:
                raise InvalidInput("kind", piece.kind, f"{piece.name} should be one of {', '.join(KINDS)}")
            if not (piece.seconds >= 0 and piece.bytes >= 0 and math.isfinite(piece.seconds + piece.bytes)):
                raise InvalidInput(piece.name, (piece.seconds, piece.bytes), "give seconds and bytes from 0 up")
            least = TOGETHER if self.closes == "all" else CLOSING
            if not least <= piece.of < self.participants or not 0 <= piece.turn < self.turns_a_step:
                expected = f"{piece.name} should be of one of {self.participants} participants"
                raise InvalidInput("of, turn", (piece.of, piece.turn), expected)
            if any(not 0 <= before < place for before in piece.after):
                raise InvalidInput("after", piece.after, f"{piece.name} should be after pieces that stand before it")
            if any(not 0 <= number < len(self.resources) for number in piece.on):
                raise InvalidInput("on", piece.on, f"{piece.name} should be on one of {len(self.resources)} resources")
            if sum(not self.resources[number].shared for number in piece.on) > 1:
                raise InvalidInput("on", piece.on, f"{piece.name} should be on at most one that works in turn")
            others = {self.pieces[before].of for before in piece.after} - {piece.of}
            if others and (self.closes != "all" or CLOSING in {piece.of, *others}):
                raise InvalidInput("after", piece.after, f"{piece.name} should wait for its own turn only")
        for resource in self.resources:
            if not (resource.capacity > 0 and resource.copies >= 1):
                raise InvalidInput(resource.name, resource.rate, "give a rate above 0, and at least 1 copy")
        return self


class LayerCost(msgspec.Struct, frozen=True):
    """What one layer, or several together, costs one replica in a step."""

    forward_s: float
    backward_s: float
    bytes: float  # of its gradient, as it lies in memory
    name: str = ""


class StepCost(msgspec.Struct, frozen=True):
    """What one step costs a replica and the owners, in the order of forward.

    >>> StepCost((LayerCost(0.01, 0.02, 4e6), LayerCost(0.02, 0.04, 8e6))).compute_s
    0.09
    """

    layers: tuple[LayerCost, ...]
    input_s: float = 0.0  # loading a batch, beside computing the one before
    sum_s: float = 0.0  # adding one gradient of the whole model to another, by one core
    update_s: float = 0.0  # the optimizer on the whole model, by one core

    @property
    def forward_s(self) -> float:
        return sum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        return sum(layer.backward_s for layer in self.layers)

    @property
    def compute_s(self) -> float:
        return round(self.forward_s + self.backward_s, 12)

    @property
    def bytes(self) -> float:
        return sum(layer.bytes for layer in self.layers)

    @staticmethod
    def whole(compute_s: float, bytes: float, *, layers: int = 1, **more: float) -> StepCost:
        """Returns the cost of a model of which only this is known: so many equal layers, and a third of it is forward.

        >>> round(StepCost.whole(0.3, 1e8, update_s=0.01).forward_s, 6)
        0.1
        """
        forward_s = compute_s / 3 / layers
        layer = LayerCost(forward_s, compute_s / layers - forward_s, bytes / layers)
        return StepCost((layer,) * layers, **more)


class BackwardRun(msgspec.Struct, frozen=True):
    """A run of backward, and the bytes of gradients that are complete after it."""

    seconds: float
    bytes: float


def backward_runs(layers: Sequence[LayerCost], bucket_bytes: float, most: int = 64) -> list[BackwardRun]:
    """Returns backward, cut where a bucket of gradients is complete, from the last layer to the first.

    A layer of several buckets is complete all at once, so it makes one run of one bucket and others that take no time.
    More than `most` are more than what is overlapped can show: then buckets are larger.

    >>> backward_runs([LayerCost(0, 0.2, 1e6), LayerCost(0, 0.1, 5e6)], 4e6)  # doctest: +NORMALIZE_WHITESPACE
    [BackwardRun(seconds=0.1, bytes=4000000.0), BackwardRun(seconds=0.2, bytes=2000000.0)]
    """
    total = sum(layer.bytes for layer in layers)
    size = max(bucket_bytes, total / most)
    runs: list[BackwardRun] = []
    seconds, waiting = 0.0, 0.0
    for layer in reversed(layers):
        seconds += layer.backward_s
        waiting += layer.bytes
        while size and waiting >= size * (1 - 1e-9):  # but for what rounding has left
            runs.append(BackwardRun(seconds, min(size, waiting)))
            seconds, waiting = 0.0, max(0.0, waiting - size)
    if seconds or waiting or not runs:
        runs.append(BackwardRun(seconds, waiting))
    return runs


class StepDraft:
    """Collects a description while it is made up: gives every piece and resource its place."""

    def __init__(self) -> None:
        self.pieces: list[StepPiece] = []
        self.resources: list[Resource] = []

    def resource(
        self,
        name: str,
        number: int | None = None,
        *,
        copies: int = 1,
        rate: float = math.inf,
        shared: bool = False,
    ) -> int:
        self.resources.append(Resource(name, number, copies, rate if rate < math.inf else None, shared))
        return len(self.resources) - 1

    def piece(
        self,
        name: str,
        kind: PieceKind,
        of: int,
        on: Sequence[int],
        *,
        seconds: float = 0.0,
        bytes: float = 0.0,
        after: Sequence[int] = (),
        turn: int = 0,
    ) -> int:
        self.pieces.append(StepPiece(name, kind, of, tuple(on), seconds, bytes, tuple(after), turn))
        return len(self.pieces) - 1

    def step(
        self,
        strategy: str,
        participants: int,
        closes: int | Literal["all", "each"] = "all",
        *,
        bound: int | None = None,
        turns_a_step: int = 1,
    ) -> StepDescription:
        return StepDescription(
            strategy, participants, tuple(self.resources), tuple(self.pieces), closes, bound, turns_a_step
        ).check()
