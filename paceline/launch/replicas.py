"""The replicas of a run on this host: their processes, started and ended here, and what the board says of them.

*Rows* are the replicas of this host, as on the board; messages and files name replicas by their rank among all hosts'.
Only this declares a death on the board, after it has waited for the process: whoever is declared dead cannot write to
shared memory any more.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from paceline.errors import ReplicaDied
from paceline.exchange.words import Phase, Word
from paceline.launch.fresh_board import board_after, new_board
from paceline.launch.guard import Guard
from paceline.launch.host_messages import ReplicaEnded, ReplicaNews, ReplicaStarted
from paceline.launch.job import RunJob
from paceline.launch.replica import ReplicaProcess
from paceline.launch.replica_output import ReplicaOutput
from paceline.launch.reporter import Reporter
from paceline.launch.starter import ColdStart
from paceline.run_place import Place
from paceline.watch.found import FoundSoFar


class LocalReplicas:
    """The replicas of a run on this host."""

    def __init__(
        self,
        job: RunJob,
        reporter: Reporter,
        selector: selectors.BaseSelector,
        guard: Guard,
        found: FoundSoFar,
        *,
        ended: Callable[[ReplicaProcess], None],
        heard: Callable[[], None],
        tell: Callable[[ReplicaNews], None],
    ) -> None:
        """Calls `ended` with a replica whose process has, `heard` when one has found something; `tell` passes on to the
        chief, wherever it is, that a process has ended or is on its way."""
        self._job, self._reporter = job, reporter
        self._selector, self._guard = selector, guard
        self._ended, self._tell = ended, tell
        self.board = new_board(job)
        self.living: dict[int, ReplicaProcess] = {}
        self.finished: set[int] = set()  # took part until their good end
        self._due: dict[int, float] = {}  # when to start a row again
        self._joining: set[int] = set()  # started again, not yet admitted
        self.output = ReplicaOutput(
            selector, reporter, found, self.living, self.finished, board=lambda: self.board, heard=heard
        )

    def start(self, row: int, place: Place, starter: ColdStart) -> None:
        """Starts the process of a row, for the first time or again."""
        again = self.board.get(row, Word.INCARNATION) % 2 == 0
        if again:
            self.board.declare_started_again(row)
            self._joining.add(row)
            self._tell(ReplicaStarted(replica=place.rank + row))
        self.board.enter(row, Phase.STARTING)
        place = msgspec.structs.replace(place, row=row, board=self.board.descriptor, restarted=again)
        folder = self._reporter.folder
        log = folder.open_log(place.rank)
        folder.forget_failure(place.rank)
        replica = ReplicaProcess(self._job.command, place, log, starter, self._guard)
        self.living[row] = replica
        self._selector.register(replica.pidfd, selectors.EVENT_READ, partial(self._on_end, replica))
        self.output.listen_to(replica)
        self._reporter.event("restarted" if again else "started", replica=replica.rank, pid=replica.pid)

    def _on_end(self, replica: ReplicaProcess) -> None:
        if self.living.get(replica.row) is replica:
            self._ended(replica)

    def drop(self, replica: ReplicaProcess) -> int:
        """Ends a replica and everything it spawned, reads the last of its output, declares it ended, and returns its
        exit code, or minus a signal."""
        replica.send(signal.SIGKILL)
        self.output.take_last(replica)
        self._selector.unregister(replica.pidfd)
        code = replica.reap()
        del self.living[replica.row]
        self._joining.discard(replica.row)
        self.board.declare_ended(replica.row)
        self._tell(ReplicaEnded(replica=replica.rank, incarnation=self.board.get(replica.row, Word.INCARNATION) - 1))
        self._guard.end_children_of(replica.row)
        return code

    def drop_all(self) -> None:
        """Ends all of them, and starts none again."""
        self._due.clear()
        for replica in list(self.living.values()):
            self.drop(replica)

    def send(self, number: signal.Signals) -> None:
        """Sends all of them a signal."""
        for replica in self.living.values():
            replica.send(number)

    @property
    def anybody_is_left(self) -> bool:
        """Whether a process runs, or is to be started again."""
        return bool(self.living or self._due)

    def have_failed_first(self) -> bool:
        """Whether the run's first failure is that of one here, whose process has not ended yet; not if that is only
        that another has died, of whom its own host says more."""
        first = self._reporter.folder.first_failure()
        if first is None or first.kind == ReplicaDied.__name__:
            return False
        return first.replica - self._job.place.rank in self.living

    @property
    def anybody_takes_part(self) -> bool:
        return any(self.board.alive(row) for row in self.living)

    @property
    def who_counts(self) -> list[int]:
        """The rows whose progress is the run's: those that take part, or did until their good end."""
        return [row for row in range(self.board.replicas) if self.board.alive(row) or row in self.finished]

    # ── starting again ───────────────────────────────────────────────────────────────────────────────────────

    def start_later(self, rows: Iterable[int], delay_s: float) -> None:
        """Has these rows started again after that time."""
        self._due.update(dict.fromkeys(rows, time.monotonic() + delay_s))

    def start_none(self) -> None:
        """Forgets whom it was to start again."""
        self._due.clear()

    def take_due(self) -> list[int]:
        """Returns the rows that are to be started now, once."""
        due = [row for row, when in self._due.items() if time.monotonic() >= when]
        for row in due:
            del self._due[row]
        return due

    def take_admitted(self) -> list[int]:
        """Returns the rows that were started again and take part now, once."""
        admitted = [row for row in self._joining if self.board.alive(row)]
        self._joining.difference_update(admitted)
        return admitted

    def begin_anew(self, *, servers: bool) -> None:
        """Ends all of them, and lays out a fresh board on which to start all."""
        self.drop_all()
        self.board = board_after(self.board, self._job, servers=servers)

    def release_latecomers(self) -> None:
        """When all who took part have ended, nobody will admit those that were started again: ends them."""
        if self.finished and not self.anybody_takes_part:
            self.drop_all()
