"""One run's training of a container, on the server that is its chief: what replicas ask, and what they are answered.

Requests come in on many threads. What the chief decides is carried out by `closing`; a report is answered when its step
has been made everywhere, so what is acknowledged is there to stay, and whoever is told about a step can pull it from
any server.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from paceline.central.chief.books import Books
from paceline.central.chief.tasks import EvaluationTask, FillTask, ResumeTask
from paceline.central.chief.tickets import End, Outcome, Wait, Work
from paceline.central.container.bounds import check_ask, check_count, check_loss, check_options
from paceline.central.container.buffers import ModelExtras
from paceline.central.container.chief_state import ChiefState
from paceline.central.container.closing import StepCloser
from paceline.central.container.presence import Presence
from paceline.central.messages.records import RuleSet, TaskResult
from paceline.central.messages.replies import Ended, Result, Settled, TaskPart, Ticket, Waiting
from paceline.central.messages.requests import Ask, GiveBack, Report, Task, TaskDone, TaskGivenBack
from paceline.data.script_call import ScriptCall
from paceline.errors import ModelError, PacelineError
from paceline.loss_value import LossPart, differing_kinds
from paceline.rules import Rule

ANSWER_WITHIN_S = 2.0  # a wait is answered with `Waiting` at least this often

Found = TypeVar("Found")


class ContainerTraining:
    """One run's training of a container."""

    def __init__(self, state: ChiefState, extras: ModelExtras, closer: StepCloser) -> None:
        """`extras`, `closer`: the container's."""
        self.state = state
        self.container, self._extras, self._closer = state.container, extras, closer
        self.presence = Presence(state)
        self._changed = state.changed  # guards all below
        self._checks: list[int] = []  # checksums of the parameters that the first replica has brought
        self._calls: dict[int | EvaluationTask, ScriptCall] = {}  # as whoever was first has made them
        self._counted: bool | None = None  # whether the loss is (sum, count), as whoever was first says

    # ── replicas ─────────────────────────────────────────────────────────────────────────────────────────

    def compare(self, replica: int, checks: list[int]) -> None:
        """Refuse replicas that do not start from the same parameters, bit by bit."""
        with self._changed:
            if self.state.chief.version or not checks:
                return
            self._checks = self._checks or checks
            for name, mine, theirs in zip(self.container.shards.names, checks, self._checks, strict=True):
                if mine != theirs:
                    raise ModelError(
                        "model",
                        name,
                        f"this parameter of replica {replica} differs from that of another at the start; set the same "
                        "seed in every process before the model is made",
                    )

    def _compare_calls(self, key: int | EvaluationTask, call: ScriptCall) -> None:
        """Let nobody go on if a replica has called `batches` or `evaluate` with something else than another one."""
        first = self._calls.setdefault(key, call)
        self._raise_for_all(call.difference(first))

    def _compare_losses(self, loss: LossPart) -> None:
        """The same if its loss is of another kind."""
        if self._counted is None:
            self._counted = loss.counted
        self._raise_for_all(differing_kinds(counted=loss.counted) if loss.counted != self._counted else None)

    def _raise_for_all(self, difference: PacelineError | None) -> None:
        self.state.failure = self.state.failure or difference
        if self.state.failure is not None:
            self._changed.notify_all()
            raise self.state.failure

    def lost(self, replica: int, incarnation: int, *, at_once: bool) -> None:
        """A connection of that replica has ended."""
        self.presence.lost(replica, incarnation, at_once=at_once)
        self.look_for_missing()

    def look_for_missing(self) -> None:
        """Called now and then: whoever has not come back in time has left."""
        for replica, incarnation in self.presence.overdue():
            self.leave(replica, incarnation)

    def leave(self, replica: int, incarnation: int) -> None:
        self.presence.leave(replica, incarnation)
        self._closer.close_steps()

    def abandon(self) -> None:
        """Nobody is expected: this is a copy, and whoever wants to train it says so."""
        with self._changed:
            for replica in list(self.state.chief.members):
                self.state.chief.leave(replica)

    def check_alone(self, what: str) -> None:
        """Refuse what would change the others' training too."""
        with self._changed:
            alone = not any(run.is_there for run in self._closer.runs if run is not self.state)
        if not alone:
            raise PacelineError(
                f"container {self.container.name!r} is being trained by other runs: this one cannot {what}; give it a "
                "container of its own (--container)"
            )

    @property
    def has_filled(self) -> bool:
        """Return whether it has given the container its first values, and all of them."""
        with self._changed:
            return self.state.trained or FillTask() in self.state.chief.tasks.results

    def books(self) -> Books:
        with self._changed:
            return self.state.chief.books()

    def stop(self) -> None:
        """Let the run end after the step in progress."""
        with self._changed:
            self.state.chief.stopping = True
            self._changed.notify_all()

    def set_rule(self, rule: Rule) -> None:
        """From now on steps close by `rule`."""
        if not rule.is_async:
            self.check_alone("be sync")
        with self._changed:
            self.state.chief.set_rule(rule)
            self.state.note(RuleSet(first=self.state.first, rule=rule))
            self._changed.notify_all()
        self.state.flush()
        self._closer.close_steps()

    def _check(self, replica: int, incarnation: int) -> None:
        self._closer.check()
        if self.state.failure is not None:
            raise self.state.failure
        self.presence.check(replica, incarnation)

    def _speaks(self, replica: int) -> bool:
        """Return whether that replica speaks for the others."""
        return replica == min(self.state.chief.members)

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────────

    def _answer(
        self, request: Ask | Report | Task, look: Callable[[], Found | str], *, at_once: bool = False
    ) -> Found | Waiting:
        """Return the reply that `look` finds, now or when something has changed; else it says what is waited for."""
        give_up = time.monotonic() + (0.0 if at_once else ANSWER_WITHIN_S)
        with self._changed:
            while True:
                self._check(request.replica, request.incarnation)
                found = "another server, which was started again" if self._closer.behind else look()
                if not isinstance(found, str):
                    return found
                if not self._changed.wait(give_up - time.monotonic()):
                    return Waiting(why=found)

    def ask(self, request: Ask) -> Ticket | Ended | Waiting:
        """Return work, or that there is none; wait a moment for it."""

        def look() -> Ticket | Ended | str:
            answer = self._work_for(request)
            if isinstance(answer, Work):
                return self._ticket(answer)
            if isinstance(answer, Wait) or self._closer.busy:
                return answer.why if isinstance(answer, Wait) else "the servers to update"
            chief = self.state.chief
            return Ended(step=chief.step, version=chief.version, stop=answer.stop, loss=chief.last.loss)

        return self._answer(request, look, at_once=request.at_once)

    def lacks_for(self, replica: int) -> set[int]:
        """Return the replicas without whose reports this one, which asks for work, gets none."""
        with self._changed:
            step = self.state.chief.open_step
            return step.lacks_for(replica) if step is not None else set()

    def held_up_by(self, replica: int) -> set[int]:
        """Return the replicas that have reported, and hear of it only when this one has too."""
        with self._changed:
            step = self.state.chief.open_step
            return step.held_up_by(replica) if step is not None else set()

    def _work_for(self, request: Ask) -> Work | Wait | End:
        check_ask(request)
        if request.call is not None:
            self._compare_calls(request.call.number, request.call)
        chief = self.state.chief
        chief.begin(request.chapter, request.length, request.batch_size, request.left_out)
        self.state.chapters[request.chapter] = (request.length, request.batch_size, request.left_out)
        return chief.ask(request.replica, request.chapter, request.stop_epoch, time.monotonic())

    def give_back(self, request: GiveBack) -> None:
        """A replica will not compute that ticket, not now."""
        with self._changed:
            self._check(request.replica, request.incarnation)
            self.state.chief.give_back(request.replica, request.ticket)
            self._changed.notify_all()
        self._closer.close_steps()

    def buffers_now(self) -> list[memoryview]:
        """Return the buffers, all as they were after one step: another may be made while they are sent."""
        with self._changed:
            return [memoryview(bytes(packed)) for packed in self._extras.buffers.packed()]

    def _ticket(self, work: Work) -> Ticket:
        following, chief = work.following, self.state.chief
        return Ticket(
            ticket=work.ticket,
            step=work.step,
            version=work.version,
            epoch=work.epoch,
            runs=[(run.start, run.stop) for run in work.runs],
            part=work.part,
            exact=work.exact,
            sync=not chief.rule.is_async,
            needed=chief.accepting,
            following=None if following is None else (following[0], [(run.start, run.stop) for run in following[1]]),
        )

    def report(self, request: Report, buffers: bytes) -> Settled | Ticket | Waiting:
        """Return what became of a ticket whose gradient is with all servers; or more work in its place."""
        replica = request.replica
        check_options(request.options, self.container.spec.optimizer.groups)
        check_loss(request.loss)
        with self._changed:
            self._check(replica, request.incarnation)
            self._compare_losses(request.loss)
            self.state.options[replica] = request.options
            self._extras.buffers.put(self.state.first + replica, buffers)
            self.state.chief.report(replica, request.ticket, request.pulled, request.loss, time.monotonic())
            self._changed.notify_all()
        self._closer.close_steps()

        def look() -> Settled | Ticket | str:
            chief = self.state.chief
            outcome = chief.outcome(replica, request.ticket)
            if outcome is not None:
                return self._settled(replica, outcome, request.ask)
            more = chief.more(replica, time.monotonic())
            return self._ticket(more) if more is not None else chief.waits(replica)

        return self._answer(request, look)

    def _settled(self, replica: int, outcome: Outcome, ask: Ask | None) -> Settled:
        coming = self._work_for(ask) if ask is not None and ask.replica == replica else None
        return Settled(
            accepted=outcome.step,
            step=self.state.chief.step,
            version=self.state.chief.version,
            loss=outcome.loss,
            samples=outcome.samples,
            replicas=len(self.state.chief.members),
            chief=self._speaks(replica),
            seen=self.state.seen,
            next=self._ticket(coming) if isinstance(coming, Work) else None,
            logged=outcome.logged,
        )

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────

    def task(self, request: Task) -> TaskPart | Result | Waiting:
        """Return a part of a task to do, or what came of it; wait a moment for those who are at it."""
        check_count("dataset length", request.length)
        if isinstance(request.key, ResumeTask):
            self.check_alone("take over a checkpoint")

        def look() -> TaskPart | Result | str:
            if self.state.trained and request.key.over_after_a_step:
                # It was started again, and runs the script from the top: all that lies behind.
                return Result(values=[], chief=self._speaks(request.replica))
            if request.call is not None and isinstance(request.key, EvaluationTask):
                self._compare_calls(request.key, request.call)
            answer = self.state.chief.ask_task(request.replica, request.key, request.length)
            if isinstance(answer, tuple):
                part, runs = answer
                return TaskPart(part=part, start=runs[0].start, stop=runs[-1].stop)
            if isinstance(answer, list):
                return Result(values=answer, chief=self._speaks(request.replica))
            return f"{answer.why} ({request.key.words})"

        return self._answer(request, look, at_once=request.at_once)

    def task_given_back(self, request: TaskGivenBack) -> None:
        """A replica will not do its part of a task, not now: somebody else does, or itself when it comes again."""
        with self._changed:
            self._check(request.replica, request.incarnation)
            self.state.chief.tasks.leave(request.replica, request.key)
            self._changed.notify_all()

    def task_done(self, request: TaskDone) -> None:
        """A replica has done its part of a task."""
        with self._changed:
            self._check(request.replica, request.incarnation)
            tasks = self.state.chief.tasks
            known = request.key in tasks.results
            tasks.finish(request.replica, request.key, request.part, request.values)
            result = tasks.results.get(request.key)
            if result is not None and not known:
                self.state.note(TaskResult(first=self.state.first, key=request.key, values=result))
            self._changed.notify_all()
        self.state.flush()
