"""Keeps the hosts of a run in one view: who takes part is decided by host 0, and by nobody else.

    host 1 ──wanted: I have lost a row──▶ host 0 ◀── (its connection ends, or it is silent) ── host 2
                                          host 0 ──proposed: view 4, rows of 0 and 1──▶ all
    host 1 ──entered: decided up to op 17──▶ host 0          when all have:
                                          host 0 ──opened: view 4, decided up to op 17──▶ all

A host that comes later is told to wait. When its replicas are ready, and the others are about to end a step, they ask
for a view that it is in, and bring it the run's state before they go on (`mirrored/newcomers.py`):

    host 2 ──ready──▶ host 0 ──may join: view 4──▶ all          … a step ends …
    host 1 ──wanted: let in at op 18──▶ host 0 ──proposed: view 5, rows of 0, 1 and 2──▶ all

What replicas do meanwhile is in `exchange/host_views.py`. There is one who decides, so there is nothing to vote on: a
host that cannot reach host 0 ends, and whoever is not in the newest view has nobody to exchange with. If the network
falls into two parts, the one with host 0 goes on, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from paceline.exchange.board import Board
from paceline.exchange.host_views import open_view, propose_view
from paceline.exchange.members import EPOCH_BITS, HostsView
from paceline.exchange.words import HostWord, Word
from paceline.launch.host_messages import (
    HostMessage,
    HostReady,
    HostsMayJoin,
    ViewEntered,
    ViewMessage,
    ViewOpened,
    ViewProposed,
    ViewWanted,
)

MOST_FUTILE = 5


class ViewKeeper:
    """One supervisor's part of it."""

    def __init__(
        self,
        host: int,
        hosts: int,
        rows: int,
        tell: Callable[[HostMessage], None],
        tell_first: Callable[[HostMessage], None],
        give_up: Callable[[str], None],
        refuse: Callable[[int, str], None],
        fewest: int = 1,
    ) -> None:
        """`rows`: that every host begins with. `tell` has all other hosts hear something, `tell_first` host 0;
        `give_up` ends the run, `refuse` sends a host away that would join it. `fewest` hosts have to be left."""
        self._host, self._hosts, self._count, self._fewest = host, hosts, rows, fewest
        self._tell, self._tell_first, self._give_up, self._refuse = tell, tell_first, give_up, refuse
        self._ready: list[int] = []  # the rows of this host that it has said are ready, if it joins
        self._number = 0  # of the view that this host is in or about to enter
        self._wanted = self._entered = (
            0  # the last view that this host could not go on in; that all its rows have entered
        )
        # On host 0 alone:
        self._rows: dict[int, list[int]] = {}  # that go on, by host, of those who are there
        self._waiting: dict[int, HostReady] = {}  # to be let in, by host
        self._joined: list[int] = []  # hosts that were let in, and nobody was told so far
        self._offered = 0  # the last view whose members know that
        self._let_in_at = 0  # the op in which the last of them get the run's state
        self._reports: dict[int, ViewEntered] = {}  # on the newest view
        self._futile = 0  # views that failed one after another, though nobody had died and before anything was decided
        self._decided = 0

    @property
    def inside(self) -> bool:
        """Whether this host takes part."""
        return self._number > 0

    def take_joined(self) -> list[int]:
        """Hosts that were let in since the last look."""
        joined, self._joined = self._joined, []
        return joined

    def begin(self, board: Board, hosts: Iterable[int]) -> None:
        """These hosts are there."""
        self._rows = {number: list(range(self._count)) for number in hosts}
        self.hear(ViewProposed(number=1, rows=self._rows), board)

    def hear(self, message: ViewMessage, board: Board) -> None:
        """What another host says, or this one to itself."""
        match message:
            case ViewProposed() if message.number > self._number and (self.inside or self._host in message.rows):
                comes, self._number = not self.inside, message.number
                counts = tuple(len(message.rows.get(host, ())) for host in range(self._hosts))
                board.host_set(HostWord.JOIN_AT, message.let_in_at or board.host_get(HostWord.JOIN_AT))
                propose_view(board, HostsView(message.number, counts), rows := message.rows.get(self._host, ()))
                if comes:
                    self.look(board, died=[row for row in rows if not board.alive(row)])
            case ViewOpened() if message.number == self._number:
                open_view(board, message.number, message.decided, message.store)
            case ViewWanted() if message.host in self._rows:
                others, self._rows[message.host] = message.rows != self._rows[message.host], message.rows
                if message.let_in_at and message.failed == self._number:
                    self._let_in(message.let_in_at)
                    self._propose(board)
                elif others:
                    self._propose(board)
                elif message.failed == self._number:
                    self._propose_the_same(board)
                if message.died:
                    self._count_hosts()
            case HostReady() if message.host not in self._rows:
                self._waiting[message.host] = message
                self._offered = 0
            case HostsMayJoin():
                board.host_set(HostWord.HOSTS_READY, message.number)
            case ViewEntered() if message.number == self._number:
                self._reports[message.host] = message
                self._open_if_all_have(board)

    def lost(self, host: int, board: Board) -> None:
        """All of a host is gone; host 0 hears of it first."""
        if self._host == 0:
            self._waiting.pop(host, None)
            if self._rows.pop(host, None) is not None:
                self._propose(board)
                self._count_hosts()

    def look(self, board: Board, died: Sequence[int] = ()) -> None:
        """Tells host 0 how this host stands: whether it can go on in the newest view, and whether all have entered it.
        `died`: rows of replicas that were killed just now."""
        number = self._number
        if not number:
            self._look_whether_ready(board)
            return
        if self._host == 0 and self._waiting and self._offered != number:
            self._offer(board)
        inside = [row for row in range(board.replicas) if board.get(row, Word.IN_VIEW) == number]
        living = [row for row in inside if board.alive(row)]
        lost = any(row in inside for row in died)
        failed = any(board.get(row, Word.VIEW_FAILED) == number for row in inside)
        let_in_at = max((_op_after(board.get(row, Word.LETS_IN), number) for row in inside), default=0)
        # A death is told each time: who dies after another of this host was still among those that go on.
        if lost or ((failed or let_in_at) and self._wanted != number):
            self._wanted = number
            wanted = ViewWanted(host=self._host, rows=living, failed=number, died=lost, let_in_at=let_in_at)
            self._tell_first(wanted)
        if self._entered != number and all(board.get(row, Word.ENTERED) == number for row in living):
            self._entered = number
            decided, store = board.host_get(HostWord.DECIDED), board.read_text(HostWord.STORE)
            self._tell_first(ViewEntered(host=self._host, number=number, decided=decided, store=store))

    def _look_whether_ready(self, board: Board) -> None:
        """This host joins: tells host 0 when all of its replicas wait to be let in."""
        living = [row for row in range(board.replicas) if board.alive(row)]
        if living and living != self._ready and all(board.get(row, Word.JOINING) for row in living):
            self._ready = living
            trainer, model = board.get(living[0], Word.ARENAS), board.host_get(HostWord.MODEL)
            self._tell_first(HostReady(host=self._host, rows=living, trainer=trainer, model=model))

    # ── host 0 ───────────────────────────────────────────────────────────────────────────────────────────

    def _propose(self, board: Board) -> None:
        self._reports.clear()
        let_in_at = self._let_in_at if self._let_in_at > self._decided else 0
        proposed = ViewProposed(number=self._number + 1, rows=self._rows, let_in_at=let_in_at)
        self._tell(proposed)
        self.hear(proposed, board)

    def _propose_the_same(self, board: Board) -> None:
        """A link broke, and nobody has died: others may do better, or not."""
        self._futile += 1
        if self._futile > MOST_FUTILE:
            self._give_up(
                "replicas of the hosts do not reach each other, though their supervisors do: open all ports between "
                "the hosts, or name the right interface by GLOO_SOCKET_IFNAME"
            )
        else:
            self._propose(board)

    def _offer(self, board: Board) -> None:
        """Has those who take part know that others wait to be let in, if they can be."""
        living = [row for row in range(board.replicas) if board.alive(row)]
        trainer = max((board.get(row, Word.ARENAS) for row in living), default=0)
        for host, ready in list(self._waiting.items()):
            if (why := _cannot_join(ready, trainer, board)) is not None:
                del self._waiting[host]
                self._refuse(host, why)
        if any(ready.trainer == trainer for ready in self._waiting.values()):
            self._offered = self._number
            self._tell(HostsMayJoin(number=self._number))
            self.hear(HostsMayJoin(number=self._number), board)

    def _let_in(self, at: int) -> None:
        self._rows |= {host: ready.rows for host, ready in self._waiting.items()}
        self._joined += self._waiting
        self._waiting.clear()
        self._let_in_at = at

    def _count_hosts(self) -> None:
        left = sum(bool(rows) for rows in self._rows.values())
        if left < self._fewest:
            there = "host is" if left == 1 else "hosts are"
            self._give_up(f"{left} {there} left, and --nnodes asks for {self._fewest} at least")

    def _open_if_all_have(self, board: Board) -> None:
        if not self._rows.keys() <= self._reports.keys():
            return
        decided = max(report.decided for report in self._reports.values())
        if decided > self._decided:
            self._decided, self._futile = decided, 0
        opened = ViewOpened(
            number=self._number,
            decided=decided,
            store=_store_of(self._rows, self._reports),
        )
        self._tell(opened)
        self.hear(opened, board)


def _cannot_join(ready: HostReady, trainer: int, board: Board) -> str | None:
    """Why a host cannot be let in, and never will be; `trainer`: of the script's, that host 0 is at."""
    if board.host_get(HostWord.CALLED):
        return "the script calls pl.barrier, pl.mean, pl.gather or pl.broadcast, and nobody knows what they returned"
    if ready.trainer > 1:
        return "the script makes several trainers before it trains, and nobody knows which of them is meant"
    if ready.trainer < trainer:
        return "the script has gone on to another trainer"
    if ready.trainer == trainer and ready.model != board.host_get(HostWord.MODEL):
        return "its model or optimizer is another than that of the others, build the same"
    return None


def _op_after(tag: int, view: int) -> int:
    """The op after one with this tag, if that was in this view; else 0."""
    return (tag >> EPOCH_BITS) + 1 if tag & (1 << EPOCH_BITS) - 1 == view else 0


def _store_of(rows: Mapping[int, Sequence[int]], reports: Mapping[int, ViewEntered]) -> str:
    """The first host that takes part has one."""
    return next((reports[host].store for host in sorted(rows) if rows[host]), "")
