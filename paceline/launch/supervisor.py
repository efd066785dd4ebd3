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

One thread, one selector: ends (pidfds), output (pipes) and signals (a wake-up pipe) are all descriptors, and ten
times a second there is a look at the board. Everything that was started is gone when `run` returns.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import msgspec

from paceline.exchange.board import Board, HostWord, Phase, Word, called
from paceline.launch.cores import allowed_cores
from paceline.launch.replica import Guard, ReplicaProcess
from paceline.launch.servers import LocalServers, ServerProcess
from paceline.launch.signals import signals_as_bytes
from paceline.run_place import INTERRUPTED, Place
from paceline.watch.display import Display, Meter, Progress
from paceline.watch.events import STALL_S, StallWatch, innermost_frames
from paceline.watch.run_folder import RunFolder

POLICIES = ("continue", "restart", "stop")

LOOK_EVERY_S = 0.1
EVENT_EVERY_S = 1.0
STOP_GRACE_S = 30.0  # after a request to stop
END_GRACE_S = 5.0  # after SIGTERM
STACK_S = 0.3  # for a replica to write its stack
QUICK_DEATH_S = 1.0  # whoever dies this soon is started again with a delay
MOST_DELAY_S = 30.0
MOST_DRAINED_CHUNKS = 16


@dataclass(frozen=True)
class RunJob:
    """What to start on this host. `place` is replica 0's; the others differ in their number."""

    script: str
    arguments: tuple[str, ...]
    place: Place
    on_failure: str = "continue"
    max_restarts: int = 10
    shown: bool = True  # pass on what the lowest living replica prints
    servers: int = 0  # to start on this host
    container: str = ""
    stall_s: float = STALL_S


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended."""

    exit_code: int
    steps: int
    seconds: float
    samples_per_second: float
    deaths: int
    restarts: int
    loss: float | None


class Supervisor:
    """Runs a job until nothing is left of it.

    *Rows* are the replicas of this host, as on the board; messages and files name replicas by their rank among
    all hosts'.
    """

    def __init__(self, job: RunJob, folder: RunFolder, display: Display) -> None:
        self._job = job
        self._folder = folder
        self._display = display
        self._board = _new_board(job)
        self._place = job.place
        self._servers: LocalServers | None = None
        self._living: dict[int, ReplicaProcess] = {}
        self._finished: set[int] = set()  # took part until their good end
        self._due: dict[int, float] = {}  # when to start a row again
        self._joining: set[int] = set()  # started again, not yet admitted
        self._quick_deaths: dict[int, int] = {}
        self._shown: int | None = 0 if job.shown else None
        self._deaths = self._restarts = 0
        self._exit_code: int | None = None  # known once the run is ending
        self._stop_requested = False
        self._kill_at: float | None = None
        self._last_signal = 0
        self._meter = Meter()
        self._progress = Progress()
        self._next_event_at = 0.0
        self._stalls = StallWatch(job.stall_s)
        self._stack: tuple[float, ReplicaProcess, int] | None = None
        self._selector = selectors.DefaultSelector()

    def run(self) -> RunOutcome:
        """Start everything and return when all of it has ended."""
        began = time.monotonic()
        # The guard comes first: forked later, it would hold open what belongs to the supervisor.
        with contextlib.closing(Guard()) as self._guard, signals_as_bytes() as self._signals:
            self._selector.register(self._signals, selectors.EVENT_READ, self._on_signal)
            try:
                self._start_servers()
                for row in range(self._job.place.rows):
                    self._start(row)
                while self._living or self._due:
                    for key, _ in self._selector.select(LOOK_EVERY_S):
                        cast(Callable[[], None], key.data)()
                    self._look()
            finally:
                for replica in list(self._living.values()):
                    self._drop(replica)
                if self._servers is not None:
                    self._servers.close(forget=self._final_exit_code() == 0)
                self._selector.close()
        outcome = RunOutcome(
            exit_code=self._final_exit_code(),
            steps=self._progress.step,
            seconds=round(time.monotonic() - began, 3),
            samples_per_second=round(self._meter.overall_samples_per_s, 1),
            deaths=self._deaths,
            restarts=self._restarts,
            loss=self._progress.loss,
        )
        if self._job.shown and outcome.exit_code == 0:
            self._look_for_strangers()
        self._event("ended", **msgspec.to_builtins(outcome))
        return outcome

    def _look_for_strangers(self) -> None:
        """Processes that never came to the board were no replicas of one another, and their user should know."""
        rows = self._job.place.rows
        if rows > 1 and not any(self._board.get(row, Word.PID) for row in range(rows)):
            self._say(
                f"the script never used Paceline: it ran {rows} times, each process for itself, or "
                "joined by its own means; pl.Trainer or pl.distribute makes them replicas of one training"
            )

    def _final_exit_code(self) -> int:
        if self._exit_code is not None:
            return self._exit_code
        return 0 if self._finished else 128 + self._last_signal

    # ── servers ──────────────────────────────────────────────────────────────────────────────────────────

    def _start_servers(self) -> None:
        if not self._job.servers:
            return
        self._servers = LocalServers(
            self._job.servers, self._folder.path, self._guard, keep=self._place.strategy.durable
        )
        place = self._servers.place(self._job.container)
        self._place = msgspec.structs.replace(self._place, servers=place)
        for number in range(self._job.servers):
            self._start_server(number)

    def _start_server(self, number: int) -> None:
        assert self._servers is not None
        server = self._servers.start(number)
        self._selector.register(server.pidfd, selectors.EVENT_READ, partial(self._on_server_end, server))
        self._event("server started", server=number, pid=server.pid)

    def _on_server_end(self, server: ServerProcess) -> None:
        assert self._servers is not None
        self._selector.unregister(server.pidfd)
        code = server.reap()
        del self._servers.living[server.number]
        if self._exit_code is not None:
            return
        self._deaths += 1
        self._look_at_progress(time.monotonic())  # the last look may be a while ago
        how = f"was killed by {_name(-code)}" if code < 0 else f"ended with code {code}"
        what = f"server {server.number} {how} {_at(self._progress.step)}"
        self._event("server ended", server=server.number, code=code, step=self._progress.step)
        words = _below(self._servers.last_words(server.number)) if code >= 0 else ""
        if self._place.strategy.durable and code < 0 and self._restarts < self._job.max_restarts:
            self._restarts += 1
            self._say(f"{what}; it is started again ({self._restarts} of at most {self._job.max_restarts} times)")
            self._start_server(server.number)
        else:
            lost = (
                ""
                if self._place.strategy.durable
                else "; its parameters are gone (--durability log would have kept them)"
            )
            self._say(f"{what}{lost}, the run ends{words}")
            self._end(128 - code if code < 0 else max(1, code))

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, row: int) -> None:
        again = self._board.get(row, Word.INCARNATION) % 2 == 0
        if again:
            self._board.declare_started_again(row)
            self._joining.add(row)
        self._board.enter(row, Phase.STARTING)
        place = msgspec.structs.replace(self._place, row=row, board=self._board.descriptor, restarted=again)
        log = self._folder.open_log(place.rank)
        self._folder.forget_failure(place.rank)
        replica = ReplicaProcess(self._job.script, self._job.arguments, place, log, self._guard)
        self._living[row] = replica
        self._selector.register(replica.pidfd, selectors.EVENT_READ, partial(self._on_end, replica))
        for descriptor in (replica.stdout, replica.stderr):
            self._selector.register(descriptor, selectors.EVENT_READ, partial(self._on_output, replica, descriptor))
        self._event("restarted" if again else "started", replica=replica.rank, pid=replica.pid)

    def _on_output(self, replica: ReplicaProcess, descriptor: int) -> bool:
        """Pass on what there is to read; whether more may come."""
        if self._living.get(replica.row) is not replica:
            return False
        data = replica.read(descriptor)
        if data is None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        elif data and replica.row == self._shown:
            self._display.pass_on(data, error=descriptor == replica.stderr)
        return bool(data)

    def _on_end(self, replica: ReplicaProcess) -> None:
        row = replica.row
        if self._living.get(row) is not replica:
            return
        took_part = self._board.alive(row)
        step = self._board.get(row, Word.STEP)
        code = self._drop(replica)
        if took_part and code in (0, INTERRUPTED):
            self._finished.add(row)
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
        for descriptor in (replica.stdout, replica.stderr):
            for _ in range(MOST_DRAINED_CHUNKS):
                if not self._on_output(replica, descriptor):
                    break
        for descriptor in (replica.pidfd, replica.stdout, replica.stderr):
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        code = replica.reap()
        del self._living[replica.row]
        self._joining.discard(replica.row)
        self._board.declare_ended(replica.row)
        return code

    # ── deaths, failures, stops ──────────────────────────────────────────────────────────────────────────

    def _on_death(self, replica: ReplicaProcess, number: int, step: int) -> None:
        name = _name(number)
        self._event("died", replica=replica.rank, signal=name, step=step)
        if self._exit_code is not None:
            return  # most likely our own doing
        self._deaths += 1
        self._last_signal = number
        what = f"{self._called(replica.rank)} was killed by {name} {_at(step)}"
        if replica.row == self._shown:
            self._shown = min(self._living, default=None)
        if self._job.on_failure == "stop":
            self._say(f"{what}; the run ends" if self._living else what)
            self._end(128 + number)
        elif self._job.on_failure == "restart" and self._restarts < self._job.max_restarts:
            self._say(f"{what}; {self._start_again(replica)}")
        elif self._finished or self._anybody_takes_part():
            self._say(f"{what}; {self._who_goes_on()}")
            self._release_latecomers()
        else:
            self._say(f"{what}; no replica is left")
            self._drop_all()

    def _who_goes_on(self) -> str:
        count = len(self._living)
        used_up = "all restarts are used up, " if self._job.on_failure == "restart" else ""
        return f"{used_up}{count} {'replica goes' if count == 1 else 'replicas go'} on"

    def _start_again(self, replica: ReplicaProcess) -> str:
        """Arrange for a new process in that row, and say so."""
        if self._is_cut:
            self._finished.clear()
            self._drop_all()  # they cannot go on without it
        if self._finished and not self._anybody_takes_part():
            self._release_latecomers()
            return "the others have finished"
        row = replica.row
        quick = time.monotonic() - replica.started_at < QUICK_DEATH_S
        self._quick_deaths[row] = self._quick_deaths.get(row, 0) + 1 if quick else 0
        delay_s = min(MOST_DELAY_S, 2.0 ** (self._quick_deaths[row] - 2)) if quick else 0.0
        when = time.monotonic() + delay_s
        self._restarts += 1
        soon = f" in {delay_s:g} s" if delay_s else ""
        counted = f"({self._restarts} of at most {self._job.max_restarts} times)"
        if self._anybody_takes_part():
            self._due[row] = when
            return f"it is started again{soon} {counted}"
        self._drop_all()
        board = Board.create(self._job.place.rows, supervised=True)
        if self._place.servers is not None:
            # Servers have not forgotten those who died, and must not take the new ones for them.
            for number in range(self._job.place.rows):
                incarnation = self._board.get(number, Word.INCARNATION) + 1
                board.set(number, Word.INCARNATION, incarnation)
                board.set(number, Word.ADMITTED, incarnation)
        os.close(self._board.descriptor)
        self._board = board
        self._due = dict.fromkeys(range(self._job.place.rows), when)
        self._shown = 0 if self._job.shown else None
        why = "a cut model needs all its devices" if self._is_cut else "no replica is left"
        return f"{why}, all start anew{soon} {counted}"

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
        if self._exit_code is not None and not self._stop_requested:
            return  # it fails because another one has failed before
        first = self._folder.first_failure()
        if first is None:
            report = replica.last_errors if replica.row != self._shown else ""
            self._say(f"{self._called(replica.rank)} ended with code {code} {_at(step)}{_below(report)}")
        elif 0 <= (row := first.replica - self._job.place.rank) < self._job.place.rows:
            at = _at(self._board.get(row, Word.STEP))
            self._say(f"{self._called(first.replica)} failed {at}{_below(first.text)}")
        # Otherwise another host's replica has failed before, and its own supervisor says so.
        self._shown = None
        self._event("failed", replica=replica.rank, code=code, step=step, kind=first.kind if first else None)
        self._stop_requested = False
        self._exit_code = None
        self._end(1 if first is not None else code)

    def _end(self, exit_code: int) -> None:
        """End all replicas: ask first, kill after a while."""
        self._exit_code = exit_code
        self._due.clear()
        self._kill_at = time.monotonic() + END_GRACE_S
        for replica in self._living.values():
            replica.send(signal.SIGTERM)

    def _on_signal(self) -> None:
        for number in os.read(self._signals, 64):
            if self._exit_code is not None or number == signal.SIGQUIT:
                self._exit_code = self._exit_code or 128 + number
                self._kill_at = time.monotonic()
                self._due.clear()
                continue
            self._exit_code = INTERRUPTED
            self._stop_requested = True
            self._due.clear()
            self._kill_at = time.monotonic() + STOP_GRACE_S
            self._board.host_set(HostWord.STOP_REQUESTED, 1)
            self._event("stopped", signal=_name(number), step=self._progress.step)
            if self._job.shown:
                self._say("stopping after this step; Ctrl-C again ends at once")

    # ── the regular look ─────────────────────────────────────────────────────────────────────────────────

    def _look(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            for replica in self._living.values():
                replica.send(signal.SIGKILL)
        for row in [row for row, when in self._due.items() if now >= when]:
            del self._due[row]
            self._start(row)
        self._look_at_progress(now)
        for row in [row for row in self._joining if self._board.alive(row)]:
            self._joining.discard(row)
            rank, step = self._job.place.rank + row, self._board.get(row, Word.STEP)
            self._say(f"replica {rank} takes part again")
            self._event("joined", replica=rank, step=step)
        self._look_for_stalls(now)

    def _look_at_progress(self, now: float) -> None:
        rows = [row for row in range(self._board.replicas) if self._board.alive(row) or row in self._finished]
        if not rows:
            return
        self._progress = self._meter.read(self._board, rows, self._job.place.rank)
        self._display.show(self._progress)
        if self._progress.step and now >= self._next_event_at:
            self._next_event_at = now + EVENT_EVERY_S
            self._event(
                "step",
                step=self._progress.step,
                total_steps=self._progress.total_steps,
                loss=self._progress.loss,
                samples_per_second=round(self._progress.samples_per_s, 1),
            )

    def _look_for_stalls(self, now: float) -> None:
        if self._stack is not None and now >= self._stack[0]:
            _, replica, log_end = self._stack
            self._stack = None
            if frames := innermost_frames(replica.stack_since(log_end)):
                self._say(f"{self._called(replica.rank)} stands at\n" + "\n".join(f"  {frame}" for frame in frames))
        stall = self._stalls.look(self._board, self._living)
        if stall is None:
            return
        first = self._job.place.rank
        busy = [first + row for row in stall.busy]
        self._event("stalled", waiting=[first + row for row in stall.waiting], waited_for=busy)
        names = ", ".join(map(self._called, busy)) or "nobody: all of them wait"
        self._say(f"a wait has taken {stall.waited_s:.0f} s: {self._board.who_waits()}; waited for: {names}")
        for row in reversed(stall.busy):  # the stack of the first is shown, all are in the logs
            asked = self._living[row].ask_for_stack()
            self._stack = None if asked is None else (now + STACK_S, self._living[row], asked)

    def _called(self, rank: int) -> str:
        return called(rank, self._job.place.strategy.devices)

    def _say(self, line: str) -> None:
        self._display.say(f"paceline: {line}")

    def _event(self, event: str, **fields: object) -> None:
        self._folder.events.write(event, **fields)


def _new_board(job: RunJob) -> Board:
    board = Board.create(job.place.rows, supervised=True)
    board.host_set(HostWord.CORES, len(allowed_cores()))
    board.host_set(HostWord.DEVICES, job.place.strategy.devices)
    return board


def _name(number: int) -> str:
    """
    >>> _name(9), _name(40)  # real-time signals have no names
    ('SIGKILL', 'signal 40')
    """
    return signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"


def _at(step: int) -> str:
    return f"at step {step}" if step else "before its first step"


def _below(report: str) -> str:
    return f":\n{report.rstrip()}" if report.strip() else ""
