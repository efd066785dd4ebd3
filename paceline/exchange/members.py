"""Members: who takes part in one try of one op (`board`), and how a try ends without having been made.

Plain values: what one look at the board has found, or what the supervisors of several hosts have agreed on.
"""

from __future__ import annotations

from dataclasses import dataclass

EPOCH_BITS = 20  # of a tag: the rest is the op's number


class OpGivenUp(Exception):
    """A member was late, and has given this op up: so do all."""

    def __init__(self, by: int) -> None:
        super().__init__(by)
        self.by = by


class MemberLost(Exception):
    """A member died, or moved on to a later epoch, before this op could complete: try it again without it."""


@dataclass(frozen=True)
class Members:
    """Which replicas of this host take part in one try of one op."""

    op: int
    epoch: int
    ranks: tuple[int, ...]
    replica: int  # who is looking
    view: HostsView | None = None  # of all hosts, if a supervisor keeps them together; its number is the epoch

    @property
    def lanes(self) -> int:
        """How many of them own shards: as many as every host has, so that each finds its like everywhere."""
        return len(self.ranks) if self.view is None else self.view.lanes

    @property
    def tag(self) -> int:
        return self.op << EPOCH_BITS | self.epoch

    @property
    def first(self) -> int:
        """The member that decides what one of them has to decide."""
        return self.ranks[0]


@dataclass(frozen=True)
class HostsView:
    """Which hosts take part in a run, from one death or arrival to the next, with how many members each.

    >>> view = HostsView(3, (2, 0, 1))
    >>> view.hosts, view.lanes, view.total, view.before(2)
    ((0, 2), 1, 3, 2)
    """

    number: int
    counts: tuple[int, ...]  # members by host; 0: it does not take part

    @property
    def hosts(self) -> tuple[int, ...]:
        return tuple(host for host, count in enumerate(self.counts) if count)

    @property
    def lanes(self) -> int:
        """What every host has at least."""
        return min((count for count in self.counts if count), default=0)

    @property
    def total(self) -> int:
        """Members of all hosts."""
        return sum(self.counts)

    def before(self, host: int) -> int:
        """Members of the hosts before that one."""
        return sum(self.counts[:host])
