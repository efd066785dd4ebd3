"""Processes of several hosts make the same calls of a script, or are told that they do not.

On one host the board shows at once who does what. Of another host one learns it only by waiting for it: whoever has
waited for a moment says in what, and looks whether somebody else waits in something else. That is certain, since ops
are numbered alike everywhere. Whoever is merely slow does not wait, and says nothing.
"""

from __future__ import annotations

import torch

from paceline.exchange.board import called, other_call
from paceline.exchange.links import Links
from paceline.exchange.together import Together
from paceline.exchange.words import HostWord, Kind


class OtherHosts:
    """The other hosts, as one process sees them that may have to wait for them."""

    def __init__(self, together: Together, links: Links) -> None:
        self._together, self._links = together, links
        links.look = self.look

    def look(self) -> None:
        """Says in what this process waits; raises if its like on another host waits in something else."""
        row = self._together.replica
        op, kind = self._together.board.doing(row)
        self._links.tell(row, f"{op} {kind:d}")
        for host, at in self._links.told(row):
            their_op, their_kind = map(int, at.split())
            if their_op == op:
                self._compare(kind, host, Kind(their_kind))

    def begin(self, kind: Kind) -> None:
        """Returns when all hosts have begun a call of the same kind. Before anything else is exchanged in it: sums
        of different calls must not meet."""
        own = torch.zeros(self._links.hosts, dtype=torch.int64)
        own[self._links.host] = kind
        for host, theirs in enumerate(self._links.sum_in_call(own).tolist()):
            self._compare(kind, host, Kind(theirs))

    def _compare(self, mine: Kind, host: int, theirs: Kind) -> None:
        if theirs != mine:
            board, row = self._together.board, self._together.replica
            devices = board.host_get(HostWord.DEVICES)
            one, other = (called(number * board.replicas + row, devices) for number in (self._links.host, host))
            raise other_call(one, mine, other, theirs)
