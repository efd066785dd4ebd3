"""Sums over hosts, as rounds of messages: what is to be sent and received next, and what to make of it.

Over H hosts a range of values is cut into H parts; each is sent to the host that sums it, and comes back summed:

    host 0   │ part 0 │ part 1 │ ──all to all──▶ sums part 0 ──all gather──▶ │ part 0 │ part 1 │
    host 1   │ part 0 │ part 1 │ ──────────────▶ sums part 1 ──────────────▶ │ part 0 │ part 1 │

What crosses is coded by the wire; sums are float32. Every host decodes the same bytes, so all have the same bits.

A sum is a generator of rounds: whoever runs it exchanges what it yields, and goes on. So any number of sums can be
under way at once, one being coded while the bytes of another are on the link.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from paceline.exchange.feedback import Feedback
from paceline.exchange.wire_format import Wire

Owed = tuple[Tensor, Tensor]  # what a range owes, and room for what it will owe


@dataclass(frozen=True)
class Round:
    """By host: where its message goes, and what it is sent. A host sends itself nothing."""

    received: list[Tensor]
    sent: list[Tensor]


class CodedSum(Protocol):
    """A range of values that is summed over all hosts, from step to step."""

    def rounds(self, values: Tensor) -> Iterator[Round]:
        """Replaces 1-D `values` by their sum over all hosts, by the time the last round is exchanged."""

    def commit(self) -> None:
        """The step was accepted: what lossy coding has lost is carried into the next one."""


class PlainSum:
    """Values that travel as they are: nothing is copied, neither on the way out nor on the way back."""

    def __init__(self, like: Tensor, host: int, hosts: int) -> None:
        """`like`: as long as the values, and of their type."""
        self._host, self._bounds = host, _bounds(like.numel(), hosts, 1)
        size = self._bounds[host + 1] - self._bounds[host]
        self._received = [like.new_empty(size if other != host else 0) for other in range(hosts)]

    def rounds(self, values: Tensor) -> Iterator[Round]:
        parts = _parts(values, self._bounds)
        own = parts[self._host]
        yield Round(self._received, parts)
        for other, received in enumerate(self._received):
            if other != self._host:
                own.add_(received)
        # What comes back for a part was summed there: what was sent for it has left long ago.
        yield Round(parts, [own] * len(parts))

    def commit(self) -> None:
        """Nothing was lost."""


class RangeSum:
    """Values that are coded one by one or in blocks, with residuals if the wire loses something."""

    def __init__(self, like: Tensor, host: int, hosts: int, wire: Wire, owed: Owed | None = None) -> None:
        """`owed`: where residuals are kept, of values that this host sends to others, and of the sums it sends out."""
        self._host, self._wire, self._bounds = host, wire, _bounds(like.numel(), hosts, wire.block)
        sizes = [stop - start for start, stop in pairwise(self._bounds)]

        def space(part: int) -> Tensor:
            return like.new_empty(wire.encoded_bytes(sizes[part]), dtype=torch.uint8)

        self._own_sum = space(host)
        self._received = [space(host) for _ in range(hosts)]
        self._sent, self._gathered = ([space(part) for part in range(hosts)] for _ in range(2))
        self._feedback: list[Feedback] = []
        if wire.lossy:
            kept = owed or (torch.zeros_like(like), torch.zeros_like(like))
            memory = zip(*(_parts(buffer, self._bounds) for buffer in kept), strict=True)
            self._feedback = [Feedback(size, wire, pair) for size, pair in zip(sizes, memory, strict=True)]

    def rounds(self, values: Tensor) -> Iterator[Round]:
        parts, host, wire = _parts(values, self._bounds), self._host, self._wire
        for part, out in enumerate(self._sent):
            if part != host:
                self._encode(part, parts[part], out)
        yield Round(self._received, self._sent)
        for other, received in enumerate(self._received):  # the host's own share has never been coded
            if other != host:
                wire.decode_add(received, parts[host])
        self._encode(host, parts[host], self._own_sum)
        # While it travels: its own part too, all hosts must hold the same bits.
        wire.decode(self._own_sum, parts[host])
        yield Round(self._gathered, [self._own_sum] * len(parts))
        for part, coded in enumerate(self._gathered):
            if part != host:
                wire.decode(coded, parts[part])

    def _encode(self, part: int, values: Tensor, out: Tensor) -> None:
        if self._feedback:
            self._feedback[part].encode(values, out)
        else:
            self._wire.encode(values, out)

    def commit(self) -> None:
        for feedback in self._feedback:
            feedback.commit()


def range_sum(like: Tensor, host: int, hosts: int, wire: Wire, owed: Owed | None = None) -> CodedSum:
    """Returns the sum of so many values on this wire."""
    return PlainSum(like, host, hosts) if wire.name == "fp32" else RangeSum(like, host, hosts, wire, owed)


def _bounds(elements: int, hosts: int, block: int) -> list[int]:
    """Where each host's part begins, and the last ends: equal ones, as far as whole blocks go."""
    part = -(-elements // (hosts * block)) * block
    return [min(elements, number * part) for number in range(hosts + 1)]


def _parts(values: Tensor, bounds: list[int]) -> list[Tensor]:
    return [values[start:stop] for start, stop in pairwise(bounds)]
