"""Hosts that exchange with one other at a time: `--gossip`, where waiting for everybody takes too long.

Each host makes steps of its own, as with `--every`. After each (or after every few) it takes the mean of its parameters
with those of one other host, another one each time, so that what one has learned is everywhere after a few exchanges.
The mean over all hosts is never changed by that, and parameters of different hosts stay near each other without ever
being the same. Where they have to be (an evaluation, a save, the end of `batches`) all hosts take the mean of all.

    exchange 0    0 ↔ 3   1 ↔ 2
    exchange 1    0 ↔ 1   2 ↔ 3       as in a tournament: everybody meets everybody
    exchange 2    0 ↔ 2   1 ↔ 3
"""

from __future__ import annotations

import torch

from paceline.exchange.coded_sums import Round
from paceline.exchange.host_sums import MOST_ROUNDS
from paceline.exchange.members import Members
from paceline.exchange.together import Together
from paceline.exchange.words import Kind, Phase
from paceline.memory.layout import FlatLayout
from paceline.memory.model_arena import ForHosts
from paceline.mirrored.link_maker import LinkMaker
from paceline.mirrored.local_steps import LocalSteps

_OF_BUFFERS = 1 << 24  # a key that no chunk has


def partner(host: int, hosts: int, turn: int) -> int | None:
    """Returns whom a host meets; None: of an odd number one sits out.

    >>> [partner(host, 4, 0) for host in range(4)], [partner(host, 3, 1) for host in range(3)]
    ([3, 2, 1, 0], [1, 0, None])
    """
    places = hosts + hosts % 2  # the last of an odd number's places is nobody's
    around = places - 1  # all but the last place sit around a table, and meet those opposite
    last = (turn * (places // 2)) % around  # whose opposite is itself: it meets the last
    opposite = {last: around, around: last}
    found = opposite.get(host, (turn - host) % around)
    return found if found < hosts else None


class Gossip(LocalSteps):
    """Averages this owner's shard with one owner of the same shard elsewhere."""

    def __init__(self, together: Together, links: LinkMaker, wire_name: str, every: int) -> None:
        super().__init__(together, links, wire_name, every)
        self._number = 0  # of the step
        self._apart = False  # hosts may differ

    def keeps(self, layout: FlatLayout) -> ForHosts:
        return ForHosts()

    def begin(self, members: Members, number: int) -> None:
        self.enter(members)
        self._number = number

    def closed(self) -> None:
        self._made += 1
        self._apart = True
        if self._made == self._every:
            self._made = 0
            self._meet_partner(partner(self.number, self.count, self._number // self._every))

    def _meet_partner(self, other: int | None) -> None:
        if other is not None:
            with self._not_tried_again("taking the mean with the other hosts"):
                self._for_all_chunks(lambda chunk: self._halve(self._values(chunk), other, chunk))
                for buffer in self._averaged:
                    values = buffer.reshape(-1).clone()  # a number, or a view that is not contiguous, is no message
                    self._halve(values, other, _OF_BUFFERS)
                    buffer.copy_(values.view(buffer.shape))
        self._together.meet(Kind.UPDATE, Phase.AWAITING_HOSTS)  # nobody computes with parts of it

    def _halve(self, values: torch.Tensor, other: int, key: int) -> None:
        """Replaces `values` by the mean with those of another host: the same bits on both."""
        assert self._links is not None
        nothing, theirs = values.new_empty(0), torch.empty_like(values)
        sent, received = (
            [part if host == other else nothing for host in range(self.count)] for part in (values, theirs)
        )
        self._links.exchange(Round(received, sent), key * MOST_ROUNDS)
        values.add_(theirs).mul_(0.5)

    def settle(self) -> bool:
        self._made = 0
        if not self._apart:
            return False
        self._apart = False
        with self._not_tried_again("taking the mean with the other hosts"):
            self._for_all_chunks(self._settle)
            self._average_buffers()
        self._together.meet(Kind.UPDATE, Phase.AWAITING_HOSTS)
        return True

    def _settle(self, chunk: int) -> None:
        values = self._values(chunk)
        self._memory.sum(chunk, values)
        values.mul_(1 / self.count)
