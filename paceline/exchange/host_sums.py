"""Ranges of values, each under a key, that all hosts sum from step to step: coded, over their links."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.exchange.coded_sums import CodedSum, PlainSum, range_sum
from paceline.exchange.links import Links
from paceline.exchange.wire import wire

MOST_ROUNDS = 8  # of a sum: messages of different rounds and sums must not be mistaken for each other


class HostSums:
    """What one owner sums with the owners of the same shard elsewhere. Several threads may sum different ranges."""

    def __init__(self, links: Links, make: Callable[[int, int], CodedSum]) -> None:
        """`make(key, elements)` makes the sum of a range, once."""
        self._links, self._make = links, make
        self._ranges: dict[int, CodedSum] = {}

    @classmethod
    def by_value(cls, links: Links, wire_name: str, device: torch.device) -> HostSums:
        """Sums that are coded without regard to what they are part of, and keep what they owe to themselves."""
        coding = wire(wire_name)

        def make(_: int, elements: int) -> CodedSum:
            return range_sum(torch.empty(elements, device=device), links.host, links.hosts, coding)

        return cls(links, make)

    def sum(self, key: int, values: torch.Tensor) -> None:
        """Replaces 1-D `values` of any float type by their sum over all hosts."""
        if values.dtype.itemsize < 4:
            wide = values.float()
            self._sum(key, wide)
            values.copy_(wide)
        else:
            self._sum(key, values)

    def _sum(self, key: int, values: torch.Tensor) -> None:
        if key not in self._ranges:
            coded, links = values.dtype is torch.float32, self._links
            self._ranges[key] = self._make(key, values.numel()) if coded else PlainSum(values, links.host, links.hosts)
        for number, one_round in enumerate(self._ranges[key].rounds(values)):
            self._links.exchange(one_round, key * MOST_ROUNDS + number)

    def commit(self) -> None:
        """The step was accepted: what lossy coding has lost is carried into the next one."""
        for coding in self._ranges.values():
            coding.commit()
