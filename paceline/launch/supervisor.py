"""The supervisor: starts the replicas of one host, notices within milliseconds when one ends, decides what then.

    a replica …                       continue          restart              stop
    ends with code 0                  the others go on  the others go on     the others go on
    is killed (kill -9, no memory)    the others go on  is started again     all end, 128 + signal
    … and is a device of a cut model                    all start anew       all end, 128 + signal
    raises, or ends with a code > 0   all end with its code, its traceback on top

An exception is a bug and not a fault: no policy goes on after one. Only the supervisor declares a death on the
board, after it has waited for the process: whoever is declared dead cannot write to shared memory any more. A
replica started again joins the others when the chief admits it; if nobody is left to admit it, all start anew on
a fresh board, and a script that resumes goes on from its checkpoint.

With servers on several hosts each host's supervisor looks after its own processes, and meets the others at host 0's
(`meeting.py`); who goes on without whom is told in `host_rule.py`.

One thread, one selector: ends (pidfds), output (pipes) and signals (a wake-up pipe) are all descriptors, and ten
times a second there is a look at the board. Everything that was started is gone when `run` returns.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

import msgspec

from paceline.exchange.words import HostWord, Phase, Word
from paceline.launch import limits
from paceline.launch.fresh_board import board_after, new_board
from paceline.launch.guard import Guard
from paceline.launch.host_messages import (
    HostComes,
    HostLost,
    HostReady,
    ReplicaEnded,
    ReplicaNews,
    ReplicaStarted,
    RunFailed,
    RunRefused,
    StopAsked,
    ViewMessage,
)
from paceline.launch.host_rule import goes_on_without, replicas_of
from paceline.launch.job import RunJob
from paceline.launch.meeting import Meeting
from paceline.launch.outcome import RunOutcome, link_bytes, outcome_of
from paceline.launch.regular_look import LOOK_EVERY_S, RegularLook
from paceline.launch.replica import ReplicaProcess, threads_of
from paceline.launch.replica_output import ReplicaOutput
from paceline.launch.reporter import Reporter, at, signal_name
from paceline.launch.restarts import Restarts
from paceline.launch.server_process import ServerProcess
from paceline.launch.servers import LocalServers, NoServers
from paceline.launch.signals import signals_as_bytes
from paceline.launch.single_host import SingleHost
from paceline.launch.starter import ColdStart, WarmStart, open_starter
from paceline.launch.view_keeper import ViewKeeper
from paceline.run_place import INTERRUPTED, MODELS
from paceline.watch.display import Display
from paceline.watch.run_folder import RunFolder

STOP_GRACE_S = 30.0  # after a request to stop
END_GRACE_S = 5.0  # after SIGTERM

Answer = TypeVar("Answer")


class Supervisor:
    """Runs a job until nothing is left of it.

    *Rows* are the replicas of this host, as on the board; messages and files name replicas by their rank among
    all hosts'.
    """

    def __init__(self, job: RunJob, folder: RunFolder, display: Display) -> None:
        self._job = job
        self._folder = folder
        self._reporter = Reporter(job, folder, display)
        self._say, self._event = self._reporter.say, self._reporter.event
        self._restarts = Restarts(job)
        self._look_at = RegularLook(job, self._reporter)
        self._board = new_board(job)
        self._place = job.place
        self._starter: WarmStart | ColdStart = ColdStart()
        self._servers: LocalServers | NoServers = NoServers()
        self._hosts: Meeting | SingleHost = SingleHost()
        self._views: ViewKeeper | None = None  # of the hosts of mirrored replicas
        self._living: dict[int, ReplicaProcess] = {}
        self._finished: set[int] = set()  # took part until their good end
        self._due: dict[int, float] = {}  # when to start a row again
        self._joining: set[int] = set()  # started again, not yet admitted
        self._exit_code: int | None = None  # known once the run is ending
        self._stop_requested = False
        self._told_of: str | None = None  # the signal of which another host has told, and that has not come here so far
        self._quit = False  # asked to end at once, as when another host has failed
        self._stopped_by: str | None = None
        self._kill_at: float | None = None
        self._last_signal = 0
        self._selector = selectors.DefaultSelector()
        self._output = ReplicaOutput(
            self._selector,
            self._reporter,
            self._look_at.found,
            self._living,
            self._finished,
            board=lambda: self._board,
            heard=self._look_for_a_stop,
        )

    def run(self) -> RunOutcome:
        """Start everything and return when all of it has ended."""
        began, sent = time.monotonic(), link_bytes()
        with contextlib.closing(Guard()) as self._guard, signals_as_bytes() as self._signals:
            self._selector.register(self._signals, selectors.EVENT_READ, self._on_signal)
            try:
                self._starter = open_starter(self._job, self._guard, threads_of(self._place))
                self._meet()
                self._await_starter()
                for row in range(self._job.place.rows) if self._exit_code is None else ():
                    self._start(row)
                while not self._is_over():
                    self._await_something()
                    self._look()
            finally:
                for replica in list(self._living.values()):
                    self._drop(replica)
                if self._look_at.forgot_to_save and not self._several and self._place.strategy.on_servers:
                    self._servers.keep_models(self._folder.path / MODELS)
                self._servers.close(forget=self._final_exit_code() == 0)
                self._hosts.close()
                self._starter.close()
                self._selector.close()
        outcome = outcome_of(
            self._job,
            self._look_at,
            self._restarts,
            self._final_exit_code(),
            time.monotonic() - began,
            self._stopped_by,
            sent,
            self._folder.path / MODELS,
        )
        rows = self._job.place.rows
        used = any(self._board.get(row, Word.PID) for row in range(rows))
        if rows > 1 and not used and self._job.shown and outcome.exit_code == 0:
            self._reporter.strangers(rows)
        self._event("ended", **msgspec.to_builtins(outcome))
        return outcome

    def _await_something(self) -> None:
        for key, _ in self._selector.select(LOOK_EVERY_S):
            cast(Callable[[], None], key.data)()

    def _is_over(self) -> bool:
        """Whether nothing runs any more, on this host or any other."""
        if self._living or self._due:
            return False
        may_join = self._job.hosts is not None and self._job.hosts.fewest is not None
        if self._is_outside or (may_join and self._place.host and self._own_exit_code() not in (0, INTERRUPTED)):
            self._hosts.leave()  # it may be started again
        self._hosts.finish(self._own_exit_code(), trained=self._exit_code is not None or bool(self._finished))
        return self._hosts.code is not None

    def _own_exit_code(self) -> int:
        if self._exit_code is not None:
            return self._exit_code
        return 0 if self._finished else 128 + self._last_signal

    def _final_exit_code(self) -> int:
        return self._hosts.code if self._hosts.code is not None else self._own_exit_code()

    # ── servers ──────────────────────────────────────────────────────────────────────────────────────────

    def _meet(self) -> None:
        """Meet the other hosts; start this host's servers, and learn where those of all hosts are."""
        job = self._job
        if job.hosts is not None:
            self._hosts = Meeting(job.hosts, self._say)
            self._selector.register(self._hosts.descriptor, selectors.EVENT_READ, lambda: None)
        elif not job.server_hosts:
            return
        if (address := self._wait_for(self._hosts.address)) is None:
            return
        servers = None
        if job.server_hosts:
            self._servers = servers = LocalServers(
                job, self._starter, self._guard, self._reporter, self._restarts, address
            )
        begins = self._wait_for(self._hosts.gather(servers.addresses if servers else {}, job.container))
        if begins is None:
            return
        if servers is None:
            self._place = place = msgspec.structs.replace(self._place, address=address, joins=begins.joins)
            hosts = self._hosts
            self._views = ViewKeeper(
                place.host,
                place.hosts,
                place.rows,
                hosts.tell,
                hosts.tell_first,
                self._cannot_go_on,
                hosts.refuse,
                (job.hosts.fewest if job.hosts is not None else None) or 1,
            )
            if not begins.joins:
                self._views.begin(self._board, begins.hosts)
            return
        at = servers.place(begins.container, begins.addresses)
        self._place = msgspec.structs.replace(self._place, servers=at)
        self._await_starter()
        for server in servers.start_all() if self._exit_code is None else ():
            self._watch(servers, server)

    def _wait_for(self, ask: Callable[[], Answer | None]) -> Answer | None:
        """What `ask` answers, as soon as it does; None, for which no other host waits, if this run is to end before."""
        while (answer := ask()) is None and self._exit_code is None:
            self._await_something()
        if answer is None:
            self._hosts.leave()
        return answer

    def _await_starter(self) -> None:
        """Wait until processes can be started."""
        if isinstance(self._starter, WarmStart) and self._starter.ready() is None:
            self._selector.register(self._starter, selectors.EVENT_READ, lambda: None)
            self._wait_for(self._starter.ready)
            self._selector.unregister(self._starter)

    def _watch(self, servers: LocalServers, server: ServerProcess) -> None:
        act = partial(self._on_server_end, servers, server)
        self._selector.register(server.pidfd, selectors.EVENT_READ, act)

    def _on_server_end(self, servers: LocalServers, server: ServerProcess) -> None:
        self._selector.unregister(server.pidfd)
        code = servers.reap(server)
        if self._exit_code is not None:
            return
        self._look_at_progress()  # the last look may be a while ago
        next_one = servers.follow(server.number, code, self._look_at.progress.step)
        if isinstance(next_one, ServerProcess):
            self._watch(servers, next_one)
        else:
            self._fail(next_one.exit_code, next_one.sentence)

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, row: int) -> None:
        again = self._board.get(row, Word.INCARNATION) % 2 == 0
        if again:
            self._board.declare_started_again(row)
            self._joining.add(row)
            self._tell_of(ReplicaStarted(replica=self._place.rank + row))
        self._board.enter(row, Phase.STARTING)
        place = msgspec.structs.replace(self._place, row=row, board=self._board.descriptor, restarted=again)
        log = self._folder.open_log(place.rank)
        self._folder.forget_failure(place.rank)
        replica = ReplicaProcess(self._job.command, place, log, self._starter, self._guard)
        self._living[row] = replica
        self._selector.register(replica.pidfd, selectors.EVENT_READ, partial(self._on_end, replica))
        self._output.listen_to(replica)
        self._event("restarted" if again else "started", replica=replica.rank, pid=replica.pid)

    def _on_end(self, replica: ReplicaProcess) -> None:
        row = replica.row
        if self._living.get(row) is not replica:
            return
        took_part = self._board.alive(row)
        step = self._board.get(row, Word.STEP)
        code = self._drop(replica)
        if took_part and code in (0, INTERRUPTED):
            self._finished.add(row)
        if code == INTERRUPTED and self._job.stops and self._exit_code is None:  # a replica counts its steps itself
            self._stop(0, by="most-steps" if step >= (self._place.most_steps or math.inf) else "another host")
        elif code == INTERRUPTED and self._several and self._exit_code is None:  # its host has not told us yet
            self._stop(INTERRUPTED, by="another host")
        if code < 0 and not self._folder.has_failure(replica.rank):  # torch may crash on the way out of a failure
            self._on_death(replica, -code, step)
        elif code != 0 and not (self._stop_requested and code == INTERRUPTED):
            self._on_failure(replica, code, step)
        else:
            self._event("finished", replica=replica.rank, code=code, step=step)
            self._release_latecomers()

    def _drop(self, replica: ReplicaProcess) -> int:
        """End a replica and everything it spawned, read the last of its output, declare it ended."""
        replica.send(signal.SIGKILL)
        self._output.take_last(replica)
        self._selector.unregister(replica.pidfd)
        code = replica.reap()
        del self._living[replica.row]
        self._joining.discard(replica.row)
        self._board.declare_ended(replica.row)
        self._tell_of(
            ReplicaEnded(replica=replica.rank, incarnation=self._board.get(replica.row, Word.INCARNATION) - 1)
        )
        self._guard.end_children_of(replica.row)
        return code

    # ── deaths, failures, stops ──────────────────────────────────────────────────────────────────────────

    def _on_death(self, replica: ReplicaProcess, number: int, step: int) -> None:
        name = signal_name(number)
        self._event("died", replica=replica.rank, signal=name, step=step)
        if self._exit_code is not None:
            return  # most likely our own doing
        self._restarts.deaths += 1
        self._last_signal = number
        if self._views is not None and self._job.on_failure != "stop":
            self._views.look(self._board, died=[replica.row])
        what = f"{self._reporter.called(replica.row)} was killed by {name} {at(step)}{limits.behind_end(-number)}"
        self._output.follow_chief()
        if self._restarts.of_replicas:
            self._say(f"{what}; {self._start_again(replica)}")
        elif self._job.on_failure == "stop" or self._is_cut:
            self._say(f"{what}; {self._restarts.used_up}the run ends" if self._living or self._several else what)
            self._fail(128 + number, what)
        elif self._finished or self._anybody_takes_part():
            count = len(self._living)
            here = " on this host" if self._several else ""
            goes = "replica goes" if count == 1 else "replicas go"
            self._say(f"{what}; {self._restarts.used_up}{count} {goes} on{here}")
            self._release_latecomers()
        elif self._several:
            self._say(f"{what}; {self._restarts.used_up}no replica is left on this host, those of others go on")
            self._drop_all()
        else:
            self._say(f"{what}; no replica is left")
            self._drop_all()

    def _start_again(self, replica: ReplicaProcess) -> str:
        """Arrange for a new process in that row, and say so."""
        if self._is_cut:
            self._finished.clear()
            self._drop_all()  # they cannot go on without it
        if self._finished and not self._anybody_takes_part():
            self._release_latecomers()
            return "the others have finished"
        now = time.monotonic()
        delay_s = self._restarts.delay_s(replica.row, now - replica.started_at)
        soon = f"{f' in {delay_s:g} s' if delay_s else ''} {self._restarts.count()}"
        if self._anybody_takes_part() or self._several:  # servers have all that it needs to know
            self._due[replica.row] = now + delay_s
            return f"it is started again{soon}"
        self._drop_all()
        self._board = board_after(self._board, self._job, servers=self._place.servers is not None)
        self._due = dict.fromkeys(range(self._job.place.rows), now + delay_s)
        self._reporter.shown = 0 if self._job.shown else None
        why = "a cut model needs all its devices" if self._is_cut else "no replica is left"
        return f"{why}, all start anew{soon}"

    @property
    def _is_cut(self) -> bool:
        """Whether a replica is several processes, of which none can do without the others."""
        return self._job.place.strategy.split is not None

    def _anybody_takes_part(self) -> bool:
        return any(self._board.alive(row) for row in self._living)

    def _release_latecomers(self) -> None:
        """When all who took part have ended, nobody will admit those that were started again."""
        if self._finished and not self._anybody_takes_part():
            self._drop_all()

    def _drop_all(self) -> None:
        self._due.clear()
        for replica in list(self._living.values()):
            self._drop(replica)

    def _on_failure(self, replica: ReplicaProcess, code: int, step: int) -> None:
        if self._exit_code is not None and not (self._stop_requested or self._quit):
            return  # it fails because another one has failed before
        steps = {row: self._board.get(row, Word.STEP) for row in range(self._job.place.rows)}
        exit_code, sentence = self._reporter.failure(replica.row, code, step, replica.last_errors, steps)
        self._stop_requested = self._quit = False
        self._exit_code = None
        self._fail(exit_code, sentence)

    def _fail(self, exit_code: int, why: str) -> None:
        """End all replicas, here and on the other hosts."""
        self._hosts.tell(RunFailed(host=self._place.host, code=exit_code, sentence=" ".join(why.split())))
        self._end(exit_code)

    def _cannot_go_on(self, why: str) -> None:
        if self._exit_code is None:
            self._say(f"{why}; the run ends")
            self._fail(1, why)

    def _end(self, exit_code: int) -> None:
        """End all replicas: ask first, kill after a while."""
        self._exit_code = exit_code
        self._due.clear()
        self._kill_at = time.monotonic() + END_GRACE_S
        for replica in self._living.values():
            replica.send(signal.SIGTERM)

    def _on_signal(self) -> None:
        for number in os.read(self._signals, 64):
            if signal_name(number) == self._told_of:
                self._told_of = None  # the same Ctrl-C, of which another host has heard sooner
                continue
            if self._exit_code is not None or number == signal.SIGQUIT:
                # The other host may have failed because of a replica here that takes longer to end: it is told of then.
                self._quit |= self._exit_code is None
                self._exit_code = self._exit_code or 128 + number
                self._kill_at = time.monotonic()
                self._due.clear()
                self._hosts.leave()
                continue
            self._stop(INTERRUPTED, signal=signal_name(number))
            if self._job.shown:
                self._say("stopping after this step; Ctrl-C again ends at once")

    def _stop(self, exit_code: int, **why: str) -> None:
        """Ask all replicas to end after the step they are at; they may save first."""
        self._look_at_progress()  # the last look may be a while ago
        self._exit_code = exit_code
        self._stop_requested = True
        self._stopped_by = next(iter(why.values()))
        self._due.clear()
        self._kill_at = time.monotonic() + STOP_GRACE_S
        self._board.host_set(HostWord.STOP_REQUESTED, 1)
        self._event("stopped", **why, step=self._look_at.progress.step)
        self._hosts.tell(StopAsked(code=exit_code, by=self._stopped_by))

    def _look_for_a_stop(self) -> None:
        """Whether the run has done enough."""
        job, found = self._job, self._look_at.found
        if self._exit_code is not None or not self._living or found.began_at is None:
            return
        if found.target_seen is not None and found.target_seen.reached is not None and not job.goes_on:
            self._stop(0, by="until")
        elif time.monotonic() - found.began_at >= (job.longest_s or math.inf):
            self._stop(0, by="longest")

    # ── other hosts ──────────────────────────────────────────────────────────────────────────────────────

    @property
    def _several(self) -> bool:
        """Whether other hosts may go on when this one cannot."""
        return self._job.hosts is not None

    @property
    def _is_outside(self) -> bool:
        """Whether this host has come to a run in progress, and has not been let in so far."""
        return self._place.joins and self._views is not None and not self._views.inside

    def _tell_of(self, news: ReplicaNews) -> None:
        """Have the chief, wherever it is, know that a process has ended or is on its way."""
        if self._several:
            self._servers.tell_chief(news)
            self._hosts.tell(news)

    def _hear(self) -> None:
        for message in self._hosts.news():
            if isinstance(message, ReplicaNews):
                self._servers.tell_chief(message)
            elif isinstance(message, ViewMessage):
                assert self._views is not None
                if isinstance(message, HostReady):
                    self._event("host ready", host=message.host)
                self._views.hear(message, self._board)
            elif isinstance(message, HostComes):
                self._event("host came", host=message.host)
                self._say(f"host {message.host} has come, and takes part as soon as it is ready")
            elif isinstance(message, RunRefused):
                self._say(message.sentence)
                self._end(1)
            elif isinstance(message, HostLost):
                self._on_host_lost(message)
            elif isinstance(message, RunFailed):
                if self._exit_code is None or self._stop_requested:
                    self._quit = self._has_failed_first()  # then it is told of when its process ends
                    if not self._quit:
                        self._say(f"host {message.host} ended the run: {message.sentence}")
                    self._stop_requested = False
                    self._end(message.code)
            elif isinstance(message, StopAsked) and self._exit_code is None:
                self._told_of = message.by
                self._stop(message.code, by=message.by)

    def _has_failed_first(self) -> bool:
        """Whether the run's first failure is that of a replica here, whose process has not ended yet."""
        first = self._folder.first_failure()
        return first is not None and first.replica - self._place.rank in self._living

    def _on_host_lost(self, lost: HostLost) -> None:
        self._event("host lost", host=lost.host, why=lost.why)
        if self._exit_code is not None and not self._stop_requested:
            return
        goes_on, sentence = goes_on_without(self._job, lost)
        self._say(sentence)
        if goes_on and self._views is not None:
            self._views.lost(lost.host, self._board)
        elif goes_on:
            for replica in replicas_of(self._job, lost.host):
                self._servers.tell_chief(ReplicaEnded(replica=replica, incarnation=None))
        else:
            # Who was asked to stop, and a second time, is gone because of that: it is no failure of this run.
            interrupted = self._stop_requested and self._exit_code == INTERRUPTED
            self._stop_requested = False
            self._end(INTERRUPTED if interrupted else 1)

    # ── the regular look ─────────────────────────────────────────────────────────────────────────────────

    def _look(self) -> None:
        now = time.monotonic()
        self._hear()
        if self._views is not None:
            self._views.look(self._board)
            for host in self._views.take_joined():
                self._say(f"host {host} takes part")
                self._event("host joined", host=host)
            if self._is_outside and self._hosts.code is not None and self._living:
                self._say("the run has ended before this host could join")
                self._drop_all()
        if self._kill_at is not None and now >= self._kill_at:
            for replica in self._living.values():
                replica.send(signal.SIGKILL)
        for row in [row for row, when in self._due.items() if now >= when]:
            del self._due[row]
            self._start(row)
        self._look_at_progress()
        self._look_for_a_stop()
        self._output.follow_chief()
        self._guard.reap_adopted()
        for row in [row for row in self._joining if self._board.alive(row)]:
            self._joining.discard(row)
            self._say(f"{self._reporter.called(row)} takes part again")
            self._event("joined", replica=self._job.place.rank + row, step=self._board.get(row, Word.STEP))
        self._look_at.for_stalls(self._board, self._living)

    def _look_at_progress(self) -> None:
        rows = [row for row in range(self._board.replicas) if self._board.alive(row) or row in self._finished]
        self._look_at.at_progress(self._board, rows)
