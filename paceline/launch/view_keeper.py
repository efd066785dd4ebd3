"""Keeps the hosts of a run in one view: who takes part is decided by host 0, and by nobody else.

    host 1 ──wanted: I have lost a row──▶ host 0 ◀── (its connection ends, or it is silent) ── host 2
                                          host 0 ──proposed: view 4, rows of 0 and 1──▶ all
    host 1 ──entered: decided up to op 17──▶ host 0          when all have:
                                          host 0 ──opened: view 4, decided up to op 17──▶ all

What replicas do meanwhile is in `exchange/host_views.py`. There is one who decides, so there is nothing to vote on: a
host that cannot reach host 0 ends, and whoever is not in the newest view has nobody to exchange with. If the network
falls into two parts, the one with host 0 goes on, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paceline.exchange.board import Board, HostsView
from paceline.exchange.host_views import open_view, propose_view
from paceline.exchange.words import HostWord, Word
from paceline.launch.host_messages import HostMessage, ViewEntered, ViewMessage, ViewOpened, ViewProposed, ViewWanted

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
    ) -> None:
        """`rows`: that every host begins with. `tell` has all other hosts hear something, `tell_first` host 0;
        `give_up` ends the run."""
        self._host, self._hosts = host, hosts
        self._tell, self._tell_first, self._give_up = tell, tell_first, give_up
        self._number = 0  # of the view that this host is in or about to enter
        self._wanted = self._entered = (
            0  # the last view that this host could not go on in; that all its rows have entered
        )
        # On host 0 alone:
        self._rows = {number: list(range(rows)) for number in range(hosts)}  # that go on, of those who are there
        self._reports: dict[int, ViewEntered] = {}  # on the newest view
        self._futile = 0  # views that failed one after another, though nobody had died and before anything was decided
        self._decided = 0

    def begin(self, board: Board) -> None:
        """All hosts are there."""
        self.hear(ViewProposed(number=1, rows=self._rows), board)

    def hear(self, message: ViewMessage, board: Board) -> None:
        """What another host says, or this one to itself."""
        match message:
            case ViewProposed() if message.number > self._number:
                self._number = message.number
                counts = tuple(len(message.rows.get(host, ())) for host in range(self._hosts))
                propose_view(board, HostsView(message.number, counts), message.rows.get(self._host, ()))
            case ViewOpened() if message.number == self._number:
                open_view(board, message.number, message.decided, message.store)
            case ViewWanted() if message.host in self._rows:
                if message.rows != self._rows[message.host]:
                    self._rows[message.host] = message.rows
                    self._propose(board)
                elif message.failed == self._number:
                    self._propose_the_same(board)
            case ViewEntered() if message.number == self._number:
                self._reports[message.host] = message
                self._open_if_all_have(board)

    def lost(self, host: int, board: Board) -> None:
        """All of a host is gone; host 0 hears of it first."""
        if self._host == 0 and self._rows.pop(host, None) is not None:
            self._propose(board)

    def look(self, board: Board, died: Sequence[int] = ()) -> None:
        """Tells host 0 how this host stands: whether it can go on in the newest view, and whether all have entered it.
        `died`: rows of replicas that were killed just now."""
        number = self._number
        if not number:
            return
        inside = [row for row in range(board.replicas) if board.get(row, Word.IN_VIEW) == number]
        living = [row for row in inside if board.alive(row)]
        failed = any(board.get(row, Word.VIEW_FAILED) == number for row in inside)
        if (failed or any(row in inside for row in died)) and self._wanted != number:
            self._wanted = number
            self._tell_first(ViewWanted(host=self._host, rows=living, failed=number))
        if self._entered != number and all(board.get(row, Word.ENTERED) == number for row in living):
            self._entered = number
            decided, store = board.host_get(HostWord.DECIDED), board.read_text(HostWord.STORE)
            self._tell_first(ViewEntered(host=self._host, number=number, decided=decided, store=store))

    # ── host 0 ───────────────────────────────────────────────────────────────────────────────────────────

    def _propose(self, board: Board) -> None:
        self._reports.clear()
        proposed = ViewProposed(number=self._number + 1, rows=self._rows)
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


def _store_of(rows: Mapping[int, Sequence[int]], reports: Mapping[int, ViewEntered]) -> str:
    """The first host that takes part has one."""
    return next((reports[host].store for host in sorted(rows) if rows[host]), "")
