"""Processes of several hosts make the same calls of a script, or are told that they do not.

On one host the board shows at once who does what. Of another host one learns it only by waiting for it: whoever has
waited for a moment says in what, and looks whether somebody else waits in something else. That is certain, since ops
are numbered alike everywhere. Whoever is merely slow does not wait, and says nothing.
"""

from __future__ import annotations

import torch

from paceline.exchange.board import called, other_call
from paceline.exchange.links import Links
from paceline.exchange.members import Members
from paceline.exchange.together import Together
from paceline.exchange.words import HostWord, Kind


class OtherHosts:
    """The other hosts, as one process sees them that may have to wait for them."""

    def __init__(self, together: Together, links: Links, members: Members) -> None:
        """`members`: of this host, in the view that the links are of."""
        self._together, self._links, self._members = together, links, members
        self._lane = members.ranks.index(members.replica)  # the same on all hosts, whichever row has it there
        links.look = self.look

    def look(self) -> None:
        """Says in what this process waits; raises if its like on another host waits in something else."""
        row = self._together.replica
        op, kind = self._together.board.doing(row)
        self._links.tell(self._lane, f"{op} {kind:d}")
        for host, at in self._links.told(self._lane):
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
            view, replica = self._members.view, self._members.replica
            own = self._called(self._links.host) if view is None else self._together.board.called(replica)
            raise other_call(own, mine, self._called(host), theirs)

    def _called(self, index: int) -> str:
        """How a sentence names this process's like on the `index`-th host that takes part."""
        board, view = self._together.board, self._members.view
        number = index if view is None else view.hosts[index]
        if view is not None and view.counts[number] < board.replicas:
            return f"a replica of host {number}"  # it has lost some, and which is not known here
        return called(number * board.replicas + self._lane, board.host_get(HostWord.DEVICES))
