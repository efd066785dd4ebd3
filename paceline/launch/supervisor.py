"""The supervisor: starts the replicas of one host, notices within milliseconds when one ends, decides what then.

    a replica …                       continue          restart              stop
    ends with code 0                  the others go on  the others go on     the others go on
    is killed (kill -9, no memory)    the others go on  is started again     all end, 128 + signal
    … and is a device of a cut model                    all start anew       all end, 128 + signal
    raises, or ends with a code > 0   all end with its code, its traceback on top

An exception is a bug and not a fault: no policy goes on after one. A replica started again joins the others when the
chief admits it; if nobody is left to admit it, all start anew on a fresh board, and a script that resumes goes on from
its checkpoint. The processes are in `replicas.py` and `servers.py`; how a run ends is told in `ending.py`.

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

from paceline.exchange.words import HostWord, Word
from paceline.launch import limits
from paceline.launch.ending import RunEnding
from paceline.launch.guard import Guard
from paceline.launch.host_messages import (
    HostComes,
    HostLost,
    HostReady,
    ReplicaEnded,
    ReplicaNews,
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
from paceline.launch.replicas import LocalReplicas
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
        self._place = job.place
        self._starter: WarmStart | ColdStart = ColdStart()
        self._servers: LocalServers | NoServers = NoServers()
        self._hosts: Meeting | SingleHost = SingleHost()
        self._views: ViewKeeper | None = None  # of the hosts of mirrored replicas
        self._ending = RunEnding()
        self._selector = selectors.DefaultSelector()

    def run(self) -> RunOutcome:
        """Start everything and return when all of it has ended."""
        began, sent = time.monotonic(), link_bytes()
        with contextlib.closing(Guard()) as self._guard, signals_as_bytes() as self._signals:
            self._selector.register(self._signals, selectors.EVENT_READ, self._on_signal)
            self._replicas = LocalReplicas(
                self._job,
                self._reporter,
                self._selector,
                self._guard,
                self._look_at.found,
                ended=self._on_end,
                heard=self._look_for_a_stop,
                tell=self._tell_of,
            )
            try:
                self._starter = open_starter(self._job, self._guard, threads_of(self._place))
                self._meet()
                self._await_starter()
                for row in range(self._job.place.rows) if not self._ending.begun else ():
                    self._replicas.start(row, self._place, self._starter)
                while not self._is_over():
                    self._await_something()
                    self._look()
            finally:
                self._replicas.drop_all()
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
            self._ending.stopped_by,
            sent,
            self._folder.path / MODELS,
        )
        rows = self._job.place.rows
        used = any(self._replicas.board.get(row, Word.PID) for row in range(rows))
        if rows > 1 and not used and self._job.shown and outcome.exit_code == 0:
            self._reporter.strangers(rows)
        self._event("ended", **msgspec.to_builtins(outcome))
        return outcome

    def _await_something(self) -> None:
        for key, _ in self._selector.select(LOOK_EVERY_S):
            cast(Callable[[], None], key.data)()

    def _is_over(self) -> bool:
        """Whether nothing runs any more, on this host or any other."""
        if self._replicas.anybody_is_left:
            return False
        may_join = self._job.hosts is not None and self._job.hosts.fewest is not None
        if self._is_outside or (may_join and self._place.host and self._own_exit_code not in (0, INTERRUPTED)):
            self._hosts.leave()  # it may be started again
        self._hosts.finish(self._own_exit_code, trained=self._ending.begun or bool(self._replicas.finished))
        return self._hosts.code is not None

    @property
    def _own_exit_code(self) -> int:
        return self._ending.code(good=bool(self._replicas.finished))

    def _final_exit_code(self) -> int:
        return self._hosts.code if self._hosts.code is not None else self._own_exit_code

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
                self._views.begin(self._replicas.board, begins.hosts)
            return
        at = servers.place(begins.container, begins.addresses)
        self._place = msgspec.structs.replace(self._place, servers=at)
        self._await_starter()
        for server in servers.start_all() if not self._ending.begun else ():
            self._watch(servers, server)

    def _wait_for(self, ask: Callable[[], Answer | None]) -> Answer | None:
        """What `ask` answers, as soon as it does; None, for which no other host waits, if this run is to end before."""
        while (answer := ask()) is None and not self._ending.begun:
            self._hosts.speak()  # torch may take long to load, and who has loaded it listens already
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
        if self._ending.begun:
            return
        self._look_at_progress()  # the last look may be a while ago
        next_one = servers.follow(server.number, code, self._look_at.progress.step)
        if isinstance(next_one, ServerProcess):
            self._watch(servers, next_one)
        else:
            self._fail(next_one.exit_code, next_one.sentence)

    # ── ends, deaths, failures ───────────────────────────────────────────────────────────────────────────

    def _on_end(self, replica: ReplicaProcess) -> None:
        took_part = self._replicas.board.alive(replica.row)
        step = self._replicas.board.get(replica.row, Word.STEP)
        code = self._replicas.drop(replica)
        if took_part and code in (0, INTERRUPTED):
            self._replicas.finished.add(replica.row)
        if code == INTERRUPTED and self._job.stops and not self._ending.begun:  # a replica counts its steps itself
            elsewhere = self._several and step < (self._place.most_steps or math.inf)
            self._stop(0, by="another host" if elsewhere else "most-steps")
        elif code == INTERRUPTED and self._several and not self._ending.begun:  # its host has not told us yet
            self._stop(INTERRUPTED, by="another host")
        if code < 0 and not self._folder.has_failure(replica.rank):  # torch may crash on the way out of a failure
            self._on_death(replica, -code, step)
        elif code != 0 and not (self._ending.stopping and code == INTERRUPTED):
            self._on_failure(replica, code, step)
        else:
            self._event("finished", replica=replica.rank, code=code, step=step)
            self._replicas.release_latecomers()

    def _on_death(self, replica: ReplicaProcess, number: int, step: int) -> None:
        name = signal_name(number)
        self._event("died", replica=replica.rank, signal=name, step=step)
        if self._ending.begun:
            return  # most likely our own doing
        self._restarts.deaths += 1
        self._ending.last_death = number
        if self._views is not None and self._job.on_failure != "stop":
            self._views.look(self._replicas.board, died=[replica.row])
        what = f"{self._reporter.called(replica.row)} was killed by {name} {at(step)}{limits.behind_end(-number)}"
        self._replicas.output.follow_chief()
        if self._restarts.of_replicas:
            self._say(f"{what}; {self._start_again(replica)}")
        elif self._job.on_failure == "stop" or self._job.is_cut:
            self._say(
                f"{what}; {self._restarts.used_up}the run ends" if self._replicas.living or self._several else what
            )
            self._fail(128 + number, what)
        elif self._replicas.finished or self._replicas.anybody_takes_part:
            count = len(self._replicas.living)
            here = " on this host" if self._several else ""
            goes = "replica goes" if count == 1 else "replicas go"
            self._say(f"{what}; {self._restarts.used_up}{count} {goes} on{here}")
            self._replicas.release_latecomers()
        elif self._several:
            self._say(f"{what}; {self._restarts.used_up}no replica is left on this host, those of others go on")
            self._replicas.drop_all()
        else:
            self._say(f"{what}; no replica is left")
            self._replicas.drop_all()

    def _start_again(self, replica: ReplicaProcess) -> str:
        """Arrange for a new process in that row, and say so."""
        if self._job.is_cut:
            self._replicas.finished.clear()
            self._replicas.drop_all()  # they cannot go on without it
        if self._replicas.finished and not self._replicas.anybody_takes_part:
            self._replicas.release_latecomers()
            return "the others have finished"
        delay_s = self._restarts.delay_s(replica.row, time.monotonic() - replica.started_at)
        soon = f"{f' in {delay_s:g} s' if delay_s else ''} {self._restarts.count()}"
        if self._replicas.anybody_takes_part or self._several:  # servers have all that it needs to know
            self._replicas.start_later([replica.row], delay_s)
            return f"it is started again{soon}"
        self._replicas.begin_anew(servers=self._place.servers is not None)
        self._replicas.start_later(range(self._job.place.rows), delay_s)
        self._reporter.shown = 0 if self._job.shown else None
        why = "a cut model needs all its devices" if self._job.is_cut else "no replica is left"
        return f"{why}, all start anew{soon}"

    def _on_failure(self, replica: ReplicaProcess, code: int, step: int) -> None:
        if not self._ending.takes_failures:
            return  # it fails because another one has failed before
        steps = {row: self._replicas.board.get(row, Word.STEP) for row in range(self._job.place.rows)}
        exit_code, sentence = self._reporter.failure(replica.row, code, step, replica.last_errors, steps)
        self._fail(exit_code, sentence)

    def _fail(self, exit_code: int, why: str) -> None:
        """End all replicas, here and on the other hosts."""
        self._hosts.tell(RunFailed(host=self._place.host, code=exit_code, sentence=" ".join(why.split())))
        self._end(exit_code)

    def _cannot_go_on(self, why: str) -> None:
        if not self._ending.begun:
            self._say(f"{why}; the run ends")
            self._fail(1, why)

    def _end(self, exit_code: int, *, failure_to_come: bool = False) -> None:
        """End all replicas: ask first, kill after a while."""
        self._ending.end(exit_code, failure_to_come=failure_to_come)
        self._replicas.start_none()
        self._replicas.send(signal.SIGTERM)

    # ── stops ────────────────────────────────────────────────────────────────────────────────────────────

    def _on_signal(self) -> None:
        for number in os.read(self._signals, 64):
            name = signal_name(number)
            if self._ending.is_echo(name):
                continue
            if self._ending.begun or number == signal.SIGQUIT:
                self._ending.end_at_once(128 + number)
                self._replicas.start_none()
                self._hosts.leave()
                continue
            self._stop(INTERRUPTED, signal=name)
            if self._job.shown:
                self._say("stopping after this step; Ctrl-C again ends at once")

    def _stop(self, exit_code: int, *, elsewhere: bool = False, **why: str) -> None:
        """Ask all replicas to end after the step they are at; they may save first."""
        self._look_at_progress()  # the last look may be a while ago
        (by,) = why.values()
        self._ending.stop(exit_code, by, elsewhere=elsewhere)
        self._replicas.start_none()
        self._replicas.board.host_set(HostWord.STOP_REQUESTED, 1)
        self._event("stopped", **why, step=self._look_at.progress.step)
        self._hosts.tell(StopAsked(code=exit_code, by=by))

    def _look_for_a_stop(self) -> None:
        """Whether the run has done enough."""
        if self._replicas.living and not self._ending.begun and (enough := self._look_at.for_enough()) is not None:
            self._stop(0, by=enough)

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
                self._views.hear(message, self._replicas.board)
            elif isinstance(message, HostComes):
                self._event("host came", host=message.host)
                self._say(f"host {message.host} has come, and takes part as soon as it is ready")
            elif isinstance(message, RunRefused):
                self._say(message.sentence)
                self._end(1)
            elif isinstance(message, HostLost):
                self._on_host_lost(message)
            elif isinstance(message, RunFailed):
                if not self._ending.begun or self._ending.stopping:
                    failed_here = self._replicas.have_failed_first()  # then it is told of when its process ends
                    if not failed_here:
                        self._say(f"host {message.host} ended the run: {message.sentence}")
                    self._end(message.code, failure_to_come=failed_here)
            elif isinstance(message, StopAsked) and not self._ending.begun:
                self._stop(message.code, elsewhere=True, by=message.by)

    def _on_host_lost(self, lost: HostLost) -> None:
        self._event("host lost", host=lost.host, why=lost.why)
        if self._ending.begun and not self._ending.stopping:
            return
        goes_on, sentence = goes_on_without(self._job, lost)
        self._say(sentence)
        if goes_on and self._views is not None:
            self._views.lost(lost.host, self._replicas.board)
        elif goes_on:
            for replica in replicas_of(self._job, lost.host):
                self._servers.tell_chief(ReplicaEnded(replica=replica, incarnation=None))
        else:
            # Who was asked to stop, and a second time, is gone because of that: it is no failure of this run.
            interrupted = self._ending.stopping and self._ending.exit_code == INTERRUPTED
            self._end(INTERRUPTED if interrupted else 1)

    # ── the regular look ─────────────────────────────────────────────────────────────────────────────────

    def _look(self) -> None:
        self._hear()
        if self._views is not None:
            self._views.look(self._replicas.board)
            for host in self._views.take_joined():
                self._say(f"host {host} takes part")
                self._event("host joined", host=host)
            if self._is_outside and self._hosts.code is not None and self._replicas.living:
                self._say("the run has ended before this host could join")
                self._replicas.drop_all()
        if self._ending.is_past_grace:
            self._replicas.send(signal.SIGKILL)
        for row in self._replicas.take_due():
            self._replicas.start(row, self._place, self._starter)
        self._look_at_progress()
        self._look_for_a_stop()
        self._replicas.output.follow_chief()
        self._guard.reap_adopted()
        for row in self._replicas.take_admitted():
            self._say(f"{self._reporter.called(row)} takes part again")
            self._event("joined", replica=self._job.place.rank + row, step=self._replicas.board.get(row, Word.STEP))
        self._look_at.for_stalls(self._replicas.board, self._replicas.living)

    def _look_at_progress(self) -> None:
        self._look_at.at_progress(self._replicas.board, self._replicas.who_counts)
