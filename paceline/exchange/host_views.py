"""Views: which hosts take part in a run, and how all of them come from one view to the next.

A view names the hosts and how many members each has. It is proposed by host 0's supervisor, the only one that does
(`launch/view_keeper.py`), and written on every host's board by its own supervisor:

    supervisor   VIEW = 4: hosts 0, 2                                            OPENED = 4, DECIDED = 17
    replicas         ├─ leave what they wait for in view 3: ENTERED = 4 ─┐       ├─ go on
                     └──────────────────────────────────────────────────┴─ all ─┘

Between hosts there is no shared memory in which a step could be seen to be complete. So an op is tried in three parts:
every host exchanges what it has (gradients, sums); when all members of a host have all of it, their *first* tells the
other hosts so; when it has heard that from all it writes the op down as DECIDED, and only then is anything changed.

When a host dies in between, some of the others may have heard that and some not. Whoever enters the next view has left
the one before, and decides nothing in it any more; so what all hosts have DECIDED by the time everybody has entered
stays true, and the largest of it is told to all when the view opens. Who is behind that has all that it needs, because
nothing is decided before everybody has: it completes the op as it was. If it was decided nowhere, nothing has been
changed anywhere, and all try it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from paceline.exchange.board import Board
from paceline.exchange.members import HostsView, MemberLost, Members
from paceline.exchange.words import HostWord, Phase, Word


def read_view(board: Board, hosts: int) -> tuple[HostsView, tuple[int, ...]]:
    """One consistent look at the newest view, and at the rows of this host that are in it."""
    while True:
        number = board.host_get(HostWord.VIEW)
        counts = tuple(board.members_on(host) for host in range(hosts))
        rows = tuple(row for row in range(board.replicas) if board.get(row, Word.IN_VIEW) == number)
        if number > 0 and number == board.host_get(HostWord.VIEW):
            return HostsView(number, counts), rows
        os.sched_yield()


# ── the supervisor's side ────────────────────────────────────────────────────────────────────────────────────


def propose_view(board: Board, view: HostsView, rows: Iterable[int]) -> None:
    """Has this host's replicas leave the view before; `rows`: those of this host that take part."""
    board.host_set(HostWord.VIEW, -view.number)
    for host, count in enumerate(view.counts):
        board.set_members_on(host, count)
    for row in rows:
        board.set(row, Word.IN_VIEW, view.number)
    board.host_set(HostWord.VIEW, view.number)


def open_view(board: Board, number: int, decided: int, store: str) -> None:
    """All have entered it. `decided`: the last op that any host has."""
    board.host_set(HostWord.DECIDED, max(decided, board.host_get(HostWord.DECIDED)))
    board.write_text(HostWord.STORE, store)
    board.host_set(HostWord.OPENED, number)


# ── a replica's side ─────────────────────────────────────────────────────────────────────────────────────────


class HostViews:
    """One replica's way from view to view."""

    def __init__(
        self, board: Board, row: int, host: int, hosts: int, timeout_s: float, serve: Callable[[], str]
    ) -> None:
        """`serve` serves a store through which processes find each other; returns where."""
        self._board, self._row, self._timeout_s = board, row, timeout_s
        self.host, self._hosts, self._serve = host, hosts, serve
        self._view, self._rows = HostsView(0, ()), tuple[int, ...]()

    def coming(self, op: int) -> Members:
        """Who will take part in `op`, as far as it is known."""
        view, rows = read_view(self._board, self._hosts)
        return Members(op, view.number, rows, self._row, view)

    def members(self, op: int) -> Members:
        """Who takes part in `op`: returns when all have entered the newest view."""
        self._enter(1)
        return Members(op, self._view.number, self._rows, self._row, self._view)

    def leave(self, members: Members) -> None:
        """A member or a link was lost in this view: returns when all have entered a later one."""
        self._board.set(self._row, Word.VIEW_FAILED, members.epoch)  # the supervisor need not have noticed why
        self._enter(members.epoch + 1)

    def leave_to_let_in(self, members: Members) -> None:
        """Hosts are let in after this step: returns when all, and they, have entered the next view."""
        self._board.set(self._row, Word.LETS_IN, members.tag)
        self._enter(members.epoch + 1)

    def _enter(self, at_least: int) -> None:
        board, row = self._board, self._row

        def ready() -> bool:
            if board.host_get(HostWord.VIEW) < at_least:
                return False
            view, rows = read_view(board, self._hosts)
            if board.get(row, Word.ENTERED) != view.number:
                if view.hosts[:1] == (self.host,) and rows[:1] == (row,):
                    board.write_text(HostWord.STORE, self._serve())
                board.set(row, Word.ENTERED, view.number)
            self._view, self._rows = view, rows
            return board.host_get(HostWord.OPENED) == view.number

        board.wait(row, Phase.AWAITING_HOSTS, ready, self._timeout_s)


def await_decision(board: Board, members: Members, timeout_s: float) -> None:
    """Until the first member has heard from all hosts that they have completed this op."""

    def ready() -> bool:
        alive = board.alive(members.first)  # looked at first: who is dead now has written it before, or never will
        if board.host_get(HostWord.DECIDED) >= members.op:
            return True
        if not alive:
            raise MemberLost
        board.check_view(members)
        return False

    board.wait(members.replica, Phase.AWAITING_HOSTS, ready, timeout_s)
