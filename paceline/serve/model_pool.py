"""The requests of one model, on their way to its processes and back: deciding is `batching`'s.

A new version has its own processes. They are made and ready before the first request goes to one of them; then every
request goes there that does not ask for the version before, whose processes end when they have nothing left to do. So
no request fails by a reload, and each is answered by one version.

A process that ends unasked is replaced. What it was at is asked of another; after a second death it is given up (503).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from paceline.errors import CheckpointError, PacelineError, ReplicaDied
from paceline.serve.batching import Asked, Refusal, RequestQueue
from paceline.serve.model_process import Answered, Died, Event, Failed, Ready
from paceline.serve.request_error import NOT_COMPUTED, REFUSED, TOO_LATE, UNAVAILABLE, UNKNOWN, RequestError
from paceline.serve.row_batches import PaddedSizes, has_rows, put_together, shape_of
from paceline.serve.served_model import Arrays, ServedAnswer
from paceline.serve.serving_metrics import ServingMetrics
from paceline.serve.template import Template
from paceline.serve.version_processes import VersionProcess, VersionProcesses
from paceline.serve.version_source import VersionSource

AWAKE_S = 0.001  # that an answer is looked for, instead of waited for, if it takes no longer
STUCK_S = 60.0  # that a process may be at one batch, beyond ten times its longest deadline, before it is killed


@dataclass
class Pending:
    """A request on its way."""

    asked: Asked
    inputs: Arrays
    future: asyncio.Future[ServedAnswer]
    arrived: float
    late_s: float  # that it may still be computed when its deadline has passed
    timer: asyncio.TimerHandle | None = None
    began: float = 0.0


class ModelPool:
    """Answers requests with processes of one model."""

    def __init__(
        self,
        template: Template,
        source: VersionSource,
        queue: RequestQueue,
        metrics: ServingMetrics,
        *,
        cores: Sequence[Sequence[int]],
        deadline_s: float,
        note: Callable[[str], None],
        member: str = "",
        pads: Sequence[str] = (),
    ) -> None:
        """`cores`: those of each process, of which there are as many. `note` is told what an operator should know.
        `member`: its name in an ensemble. `pads`: inputs that are padded, so that requests of several sizes go
        together."""
        self.queue, self.metrics, self._source, self._note, self._member = queue, metrics, source, note, member
        self._sizes = PaddedSizes(pads)
        metrics.queue_depth.labels(member).set_function(lambda: len(queue.waiting))
        metrics.processes.labels(member).set_function(lambda: queue.processes)
        self._deadline_s = deadline_s
        self._processes = VersionProcesses(template, source, cores, heard=self._heard, note=note)
        self._pending: dict[int, Pending] = {}
        self._loading = asyncio.Lock()
        self._numbers = 0
        self._closing = False

    @property
    def version(self) -> int | None:
        """Returns the version that answers; None if there is none."""
        return self.queue.version or None

    @property
    def versions(self) -> list[int]:
        """Returns the versions that can be asked by number."""
        return sorted(self.queue.versions | ({self.queue.version} - {0}))

    @property
    def most_rows(self) -> int:
        """Returns how many rows are computed together at most."""
        return self.queue.most_rows

    @property
    def problem(self) -> str:
        """Returns what is wrong with the source of its versions; empty if nothing is."""
        return self._source.problem

    @property
    def is_ready(self) -> bool:
        """Returns whether there is a process that answers."""
        return bool(self.queue.version) and self.queue.version in self.queue.versions and not self._closing

    @property
    def processes(self) -> dict[str, int]:
        """Returns the numbers of the processes by name."""
        return {name: member.process.process for name, member in self._processes.by_name.items()}

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────

    def refusal(self, deadline_s: float) -> Refusal | None:
        """Returns why no request whatsoever could be answered in that time, and counts that; None: one might."""
        if (refusal := self.foreseen(deadline_s)) is not None:
            self._count(refusal)
        return refusal

    def foreseen(self, deadline_s: float) -> Refusal | None:
        """Returns the same without counting it, for an ensemble, which may do without this member."""
        now = time.monotonic()
        return self.queue.refusal(now + deadline_s, now)

    def ask(self, inputs: Arrays, rows: int, deadline_s: float, version: int | None) -> asyncio.Future[ServedAnswer]:
        """Takes a request, and returns what will have its answer, or the RequestError that says why there is none; one
        that is refused at once raises it. Whoever cancels it has gone away.

        What is being computed when its deadline passes is waited for as long again: it is nearly there, and whoever
        does not wait for it has gone away."""
        pending = self.submit(inputs, rows, deadline_s, version, late_s=deadline_s)
        pending.future.add_done_callback(partial(self._asked, pending))
        return pending.future

    def _asked(self, pending: Pending, future: asyncio.Future[ServedAnswer]) -> None:
        if future.cancelled():
            self.metrics.left.inc()
        self.withdraw(pending)

    def submit(self, inputs: Arrays, rows: int, deadline_s: float, version: int | None, *, late_s: float) -> Pending:
        """Takes a request, whose answer or RequestError will be in its future; raises if it is refused at once.
        Whoever calls this calls `withdraw` too, in the end."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        if not self.queue.version:
            raise RequestError(UNAVAILABLE, "the model is not loaded: POST /v2/repository/models/NAME/load loads it")
        if version is not None and version != self.queue.version and version not in self.queue.versions:
            raise RequestError(UNKNOWN, f"version is {version}: the one that answers is {self.queue.version}")
        self._numbers += 1
        asked = Asked(self._numbers, shape_of(inputs, self._sizes.pads), rows, now + deadline_s, version)
        if (refusal := self.queue.arrive(asked, now)) is not None:
            self._count(refusal)
            raise busy(refusal)
        pending = Pending(asked, inputs, loop.create_future(), now, late_s)
        self._pending[asked.number] = pending
        pending.timer = loop.call_later(deadline_s, self._too_late, pending)
        self._dispatch()
        return pending

    def withdraw(self, pending: Pending) -> None:
        """Forgets a request: it was answered, or nobody waits for it any more."""
        if pending.timer is not None:
            pending.timer.cancel()
        self._pending.pop(pending.asked.number, None)
        if pending.asked.number in self.queue.waiting:
            self.queue.leave(pending.asked.number)
        if pending.future.done() and not pending.future.cancelled():
            pending.future.exception()  # it is known to whoever asked, or of no interest to anybody
        pending.future.cancel()

    def _count(self, refusal: Refusal) -> None:
        self.metrics.refused.labels("no room" if "no room" in refusal.why else "deadline").inc()

    def _too_late(self, pending: Pending) -> None:
        if pending.future.done():
            return
        if self.queue.leave(pending.asked.number):
            self.metrics.refused.labels("waited").inc()
            error = RequestError(REFUSED, "the server is busy: its deadline passed while it waited", 1.0)
        elif pending.late_s:
            loop, late_s, pending.late_s = asyncio.get_running_loop(), pending.late_s, 0.0
            pending.timer = loop.call_later(late_s, self._too_late, pending)
            return
        else:
            usual_s, given_s = self.queue.alone_s(pending.asked), pending.asked.deadline - pending.arrived
            if given_s < usual_s:  # it found a free process, and was let try
                self.metrics.refused.labels("deadline").inc()
                why = f"its answer takes about {usual_s:.3g} s and its deadline was after {given_s:.3g} s"
                error = RequestError(REFUSED, f"{why}: give a later deadline", usual_s)
            else:
                error = RequestError(TOO_LATE, "the model has not answered in time: give a later deadline")
        pending.future.set_exception(error)

    def _dispatch(self) -> None:
        now = time.monotonic()
        for name, batch in self.queue.dispatch(now):
            member = self._processes.by_name[name]
            member.batch = [self._pending[asked.number] for asked in batch]
            member.since = now
            member.process.ask(put_together([pending.inputs for pending in member.batch]))
            for pending in member.batch:
                pending.began = now
                self.metrics.queue_seconds.observe(now - pending.arrived)
            self.metrics.batch_requests.observe(len(batch))
            self.metrics.batch_rows.observe(max(1, sum(asked.rows for asked in batch)))
            if len(self._pending) == 1 and self.queue.alone_s(batch[0]) < AWAKE_S:
                asyncio.get_running_loop().call_soon(self._stay_awake, name, now + AWAKE_S)

    def _stay_awake(self, name: str, until: float) -> None:
        """Looks for the answer to the only request, which will be there sooner than this process could fall asleep and
        be woken; between two looks others have their turn."""
        member = self._processes.by_name.get(name)
        if len(self._pending) == 1 and member is not None and member.process.asked is not None:
            self._heard(name, may_have_ended=False)
            if len(self._pending) == 1 and time.monotonic() < until:
                os.sched_yield()
                asyncio.get_running_loop().call_soon(self._stay_awake, name, until)

    # ── what processes say ───────────────────────────────────────────────────────────────────────────────────

    def _heard(self, name: str, *, may_have_ended: bool = True) -> None:
        member = self._processes.by_name.get(name)
        if member is None:
            return
        for event in member.process.events(may_have_ended=may_have_ended):
            self._take(name, member, event)
        if self.queue.waiting:
            self._dispatch()
        if member.version != self.queue.version:
            self._retire()

    def _take(self, name: str, member: VersionProcess, event: Event) -> None:
        if isinstance(event, Ready):
            if not member.started.done():
                member.started.set_result(None)
        elif isinstance(event, Answered):
            self._answered(name, member, event)
        elif isinstance(event, Failed):
            told = {asked.number for asked in self.queue.failed(name)}
            for pending in member.batch:
                if pending.asked.number in told:
                    error = RequestError(NOT_COMPUTED, f"the model could not compute this: {event.reason}")
                    _settle(pending, error)
            self._forget_the_gone()
        elif isinstance(event, Died):
            self._died(name, member, event)

    def _answered(self, name: str, member: VersionProcess, event: Answered) -> None:
        batch = self.queue.answered(name, time.monotonic())
        self.metrics.compute_seconds.observe(event.seconds)
        together, rows = [pending.inputs for pending in member.batch], [asked.rows for asked in batch]
        if len(batch) > 1 and not has_rows(event.value, sum(rows)):
            self._note(
                f"the model's answer to {sum(rows)} rows has not as many: requests are computed one by one from now on"
            )
            self.queue.most_rows = 1
            self._compute_again(batch)
            return
        if rows[0] and not self._sizes.learn(event.value, together):
            self._note(
                "the model's answer has a size that is no input's and not always the same: "
                "requests of several sizes are not put together from now on"
            )
        parts = self._sizes.divided(event.value, together, rows)
        if parts is None:
            self._compute_again(batch)
            return
        step = self._processes.taken[member.version].step
        for pending, own in zip(member.batch, parts, strict=True):
            waited = pending.began - pending.arrived
            _settle(pending, ServedAnswer(own, member.version, name, len(batch), waited, event.seconds, step))

    def _compute_again(self, batch: list[Asked]) -> None:
        """Has each request of a batch computed alone, since it cannot be told what of the answer is whose."""
        self.queue.put_back(batch)
        self._forget_the_gone()

    def _forget_the_gone(self) -> None:
        """What waits again has a client that still waits."""
        for number in [number for number in self.queue.waiting if number not in self._pending]:
            self.queue.leave(number)

    def _died(self, name: str, member: VersionProcess, died: Died) -> None:
        if not member.started.done():
            why = CheckpointError if died.broken else ReplicaDied
            member.started.set_exception(why(died.reason))
            return
        if name not in self.queue.running:
            return  # nobody has asked it yet: `_take_in` will see
        self.metrics.deaths.inc()
        given_up = {asked.number for asked in self.queue.remove_process(name)}
        for pending in member.batch:
            if pending.asked.number in given_up:
                error = RequestError(UNAVAILABLE, "the process that computed this died, and so did the next", 1.0)
                _settle(pending, error)
        self._forget_the_gone()
        member.batch = []
        if self._wants(member.version):
            self._note(f"process {name} has ended ({died.reason}) and is replaced")
            self._processes.spawn(self._replace(name))
        else:
            self._processes.drop(name)
            self._give_up_on(member.version)

    def _give_up_on(self, version: int) -> None:
        """Tells those who asked for a version by its number, of which no process is left."""
        if version in self.queue.versions:
            return
        for number in [number for number, asked in self.queue.waiting.items() if asked.version == version]:
            self.queue.leave(number)
            error = RequestError(UNAVAILABLE, f"the last process of version {version} died: ask for another version")
            _settle(self._pending[number], error)

    # ── versions ─────────────────────────────────────────────────────────────────────────────────────────────

    async def load(self) -> int:
        """Takes what the source has now as a new version, and returns its number."""
        async with self.loading() as version:
            return version

    @contextlib.asynccontextmanager
    async def loading(self) -> AsyncIterator[int]:
        """A block at whose beginning a new version is ready, of what the source has now, and from whose end on it
        answers; if the block fails, all is as it was."""
        async with self._loading:
            try:
                version, names = await self._processes.make_version()
            except PacelineError:
                self.metrics.reloads.labels("failed").inc()
                raise
            try:
                yield version
            except BaseException:
                self._processes.discard(version, names)
                raise
            for name in names:
                self._take_in(name)
            self.queue.version = version
            self.metrics.reloads.labels("loaded").inc()
            self.metrics.version.labels(self._member).set(version)
            if (step := self._processes.taken[version].step) is not None:
                self.metrics.step.labels(self._member).set(step)
            self._dispatch()
            self._retire()

    def _take_in(self, name: str) -> None:
        """Has a process that has been ready be asked from now on; it may have died since."""
        member = self._processes.by_name[name]
        if member.process.alive:
            self.queue.add_process(name, member.version)
        else:
            self._processes.spawn(self._replace(name))

    async def unload(self) -> None:
        """Has nobody answer any more. What is being computed is still answered; what waits is not."""
        async with self._loading:
            self.queue.version = 0
            for number, pending in list(self._pending.items()):
                if self.queue.leave(number):
                    _settle(pending, RequestError(UNAVAILABLE, "the model was unloaded"))
            self._retire()

    async def look(self) -> None:
        """Loads a new version if its source has changed, and ends processes that are stuck."""
        self._kill_the_stuck()
        before = self._source.problem
        changed = await asyncio.to_thread(self._source.has_changed)
        if (problem := self._source.problem) != before:
            self.metrics.source_lost.labels(self._member).set(1 if problem else 0)
            answers = f"version {self.version} answers on" if self.version else "nobody answers"
            self._note(f"{problem or f'{self._source.words} is there again'}: {answers}")
        if changed and self.version is not None:
            try:
                version = await self.load()
                self._note(f"version {version} of {self._words_of(version)} answers from now on")
            except PacelineError as error:
                self._note(f"a new version was not loaded, and all is as it was: {error}")

    def _words_of(self, version: int) -> str:
        taken = self._processes.taken.get(version)
        of_step = f" after step {taken.step}" if taken is not None and taken.step is not None else ""
        return f"{self._source.words}{of_step}"

    def _wants(self, version: int) -> bool:
        return version == self.queue.version and not self._closing

    async def _replace(self, name: str) -> None:
        new = await self._processes.replace(name, self._wants)
        if new is not None:
            self._take_in(new)
            self._dispatch()
        self._retire()

    def _retire(self) -> None:
        for name in self.queue.retired():
            self.queue.remove_process(name)
            self._processes.drop(name)
        self._processes.forget_versions(self.queue.version)

    def _kill_the_stuck(self) -> None:
        """Kills processes that have been at one batch for longer than anybody waits."""
        now = time.monotonic()
        for name, batch in self.queue.running.items():
            member = self._processes.by_name[name]
            longest_s = max([self._deadline_s, *(pending.asked.deadline - pending.arrived for pending in member.batch)])
            if batch and now - member.since > STUCK_S + 10 * longest_s:
                member.process.kill()
                self._died(name, member, Died(f"it had been at one batch for {now - member.since:.0f} s", None))

    async def close(self) -> None:
        """Ends all processes. What is being computed gets no answer: drain before."""
        self._closing = True
        for pending in list(self._pending.values()):
            _settle(pending, RequestError(UNAVAILABLE, "the server is ending"))
        await self._processes.close()


def busy(refusal: Refusal) -> RequestError:
    """Returns what whoever is refused is told."""
    return RequestError(REFUSED, f"the server is busy: {refusal.why}", refusal.retry_after_s)


def _settle(pending: Pending, result: ServedAnswer | RequestError) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):  # its deadline has passed, or its client has gone away
        if isinstance(result, RequestError):
            pending.future.set_exception(result)
        else:
            pending.future.set_result(result)
