"""What the replicas of a host print and find, passed on as it comes.

The user sees what the one prints whose `trainer.chief` is true, whoever that is at the moment; the logs have all of it.
"""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable, Collection, Mapping
from functools import partial

from paceline.exchange.board import Board
from paceline.exchange.words import Word
from paceline.launch.replica import ReplicaProcess
from paceline.launch.reporter import Reporter
from paceline.watch.found import FoundSoFar

MOST_DRAINED_CHUNKS = 16


class ReplicaOutput:
    """Listens to the replicas that live."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        reporter: Reporter,
        found: FoundSoFar,
        living: Mapping[int, ReplicaProcess],
        finished: Collection[int],
        board: Callable[[], Board],
        heard: Callable[[], None],
    ) -> None:
        """`living` and `finished`, by row, change by themselves. `heard` is called when something was found."""
        self._selector = selector
        self._reporter = reporter
        self._found = found
        self._living = living
        self._finished = finished
        self._board = board
        self._heard = heard

    def listen_to(self, replica: ReplicaProcess) -> None:
        for descriptor in (replica.stdout, replica.stderr):
            act = partial(self._on_output, replica, descriptor)
            self._selector.register(descriptor, selectors.EVENT_READ, act)
        self._selector.register(replica.findings, selectors.EVENT_READ, partial(self._on_findings, replica))

    def take_last(self, replica: ReplicaProcess) -> None:
        """Pass on the last words of one that has ended, and listen to it no more."""
        self._drain(replica)
        for descriptor in (replica.stdout, replica.stderr, replica.findings):
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)

    def follow_chief(self) -> None:
        """Show the replica whose `trainer.chief` is true."""
        shown = self._reporter.shown
        chief = None if shown is None else _next_shown(self._board(), self._living, self._finished, shown)
        if shown is None or chief is None:
            return
        if shown in self._living:
            self._drain(self._living[shown])
        self._reporter.show_another(chief)
        self._found.hear(chief)

    def _on_output(self, replica: ReplicaProcess, descriptor: int) -> None:
        self.follow_chief()
        self._pass_on(replica, descriptor)

    def _pass_on(self, replica: ReplicaProcess, descriptor: int) -> bool:
        """Pass on what there is to read; whether more may come."""
        if self._living.get(replica.row) is not replica:
            return False
        data = replica.read(descriptor)
        if data is None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        elif data:
            self._reporter.pass_on(replica.row, data, error=descriptor == replica.stderr)
        return bool(data)

    def _on_findings(self, replica: ReplicaProcess) -> None:
        self.follow_chief()
        self._take_findings(replica)
        if replica.told_all:
            with contextlib.suppress(KeyError):  # its end may have come in the same look, before this
                self._selector.unregister(replica.findings)
        self._heard()

    def _take_findings(self, replica: ReplicaProcess) -> None:
        for message in replica.read_findings() if self._living.get(replica.row) is replica else ():
            self._found.take(replica.row, message, self._reporter.shown)

    def _drain(self, replica: ReplicaProcess) -> None:
        self._take_findings(replica)
        for descriptor in (replica.stdout, replica.stderr):
            for _ in range(MOST_DRAINED_CHUNKS):
                if not self._pass_on(replica, descriptor):
                    break


def _next_shown(board: Board, living: Collection[int], finished: Collection[int], shown: int) -> int | None:
    """The row to show from now on instead of `shown`: the first of those who take part; None: it stays.

    One that was started again is chief from the first op on that it begins as a member; what the one before it had to
    say as chief it has printed before it begins that op itself. Nobody repeats the last words of one that has finished.
    """
    members = [row for row in living if board.alive(row)]
    first = min((row for row in members if board.get(row, Word.OP) >= board.get(row, Word.ADMIT_AT)), default=None)
    if first is None or (first >= shown and shown in {*living, *finished}):
        return None
    if shown in living and board.alive(shown) and board.get(shown, Word.OP) < board.get(first, Word.ADMIT_AT):
        return None
    return first
