"""The processes of one model, by version, and the requests on their way to them and back: deciding is `batching`'s.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.errors import CheckpointError, PacelineError
from paceline.serve.batching import Asked, RequestQueue
from paceline.serve.model_process import Answered, Died, Event, Failed, ModelProcess, Ready
from paceline.serve.request_error import (
    NOT_COMPUTED,
    REFUSED,
    TOO_LATE,
    UNAVAILABLE,
    UNKNOWN,
    RequestError,
)
from paceline.serve.serving_metrics import ServingMetrics
from paceline.serve.shared_values import StackedRows
from paceline.serve.template import FileIdentity, FromTemplate, Template, copy_checkpoint, identity_of

Arrays = Mapping[str, np.ndarray]
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # before a process that failed to start is tried again
STUCK_S = 60.0  # that a process may be at one batch, beyond ten deadlines, before it is killed


@dataclass(frozen=True)
class ServedAnswer:
    """An answer, and where it came from."""

    outputs: dict[str, np.ndarray]
    version: int
    process: str
    requests: int  # that were computed together with it, itself included
    waited_s: float
    computed_s: float


@dataclass
class _Pending:
    asked: Asked
    inputs: Arrays
    future: asyncio.Future[ServedAnswer]
    arrived: float
    began: float = 0.0


@dataclass
class _Member:
    process: ModelProcess
    version: int
    batch: list[_Pending]
    since: float
    started: asyncio.Future[None]


class ModelPool:
    """Answers requests with processes of one model."""

    def __init__(
        self,
        template: Template,
        path: str,
        queue: RequestQueue,
        metrics: ServingMetrics,
        *,
        cores: Sequence[Sequence[int]],
        deadline_s: float,
        note: Callable[[str], None],
    ) -> None:
        """`cores`: those of each process, of which there are as many. `note` is told what an operator should know."""
        self.queue, self.metrics, self.path = queue, metrics, path
        self._template, self._cores, self._note = template, cores, note
        self._stuck_s = STUCK_S + 10 * deadline_s
        self._members: dict[str, _Member] = {}
        self._copies: dict[int, int] = {}  # by version: the descriptor of its checkpoint
        self._pending: dict[int, _Pending] = {}
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = self._versions = self._names = 0
        self._closing = False
        self.loaded: FileIdentity | None = None  # the file that was taken last, whether or not it could be

    @property
    def version(self) -> int | None:
        """Returns the version that answers; None if there is none."""
        return self.queue.version or None

    @property
    def is_ready(self) -> bool:
        """Returns whether there is a process that answers."""
        return bool(self.queue.version) and self.queue.version in self.queue.versions and not self._closing

    @property
    def processes(self) -> dict[str, int]:
        """Returns the numbers of the processes by name."""
        return {name: member.process.process for name, member in self._members.items()}

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────

    async def answer(
        self, inputs: Arrays, shape: Any, rows: int, deadline_s: float, version: int | None
    ) -> ServedAnswer:
        """Returns the model's answer; RequestError says why there is none. Whoever cancels this has gone away."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        if not self.queue.version:
            raise RequestError(UNAVAILABLE, "the model is not loaded: POST /v2/repository/models/NAME/load loads it")
        if version is not None and version != self.queue.version and version not in self.queue.versions:
            raise RequestError(UNKNOWN, f"version is {version}: the one that answers is {self.queue.version}")
        self._numbers += 1
        asked = Asked(self._numbers, shape, rows, now + deadline_s, version)
        if (refusal := self.queue.arrive(asked, now)) is not None:
            self.metrics.refused.labels("no room" if "no room" in refusal.why else "deadline").inc()
            raise RequestError(REFUSED, f"the server is busy: {refusal.why}", refusal.retry_after_s)
        pending = _Pending(asked, inputs, loop.create_future(), now)
        self._pending[asked.number] = pending
        timer = loop.call_later(deadline_s, self._too_late, pending)
        self._dispatch()
        try:
            return await pending.future
        except asyncio.CancelledError:
            self.metrics.left.inc()
            raise
        finally:
            timer.cancel()
            self._pending.pop(asked.number, None)
            self.queue.leave(asked.number)

    def _too_late(self, pending: _Pending) -> None:
        if pending.future.done():
            return
        if self.queue.leave(pending.asked.number):
            self.metrics.refused.labels("waited").inc()
            error = RequestError(REFUSED, "the server is busy: its deadline passed while it waited", 1.0)
        else:
            error = RequestError(TOO_LATE, "the model has not answered before the deadline: give it a later one")
        pending.future.set_exception(error)

    def _dispatch(self) -> None:
        now = time.monotonic()
        for name, batch in self.queue.dispatch(now):
            member = self._members[name]
            member.batch = [self._pending[asked.number] for asked in batch]
            member.since = now
            for pending in member.batch:
                pending.began = now
                self.metrics.queue_seconds.observe(now - pending.arrived)
            first = member.batch[0].inputs
            if len(batch) == 1:
                member.process.ask(dict(first))
            else:
                parts = {key: StackedRows([pending.inputs[key] for pending in member.batch]) for key in first}
                member.process.ask(parts)
            self.metrics.batch_requests.observe(len(batch))
            self.metrics.batch_rows.observe(max(1, sum(asked.rows for asked in batch)))
        self.metrics.queue_depth.set(len(self.queue.waiting))

    # ── what processes say ───────────────────────────────────────────────────────────────────────────────────

    def _heard(self, name: str) -> None:
        member = self._members.get(name)
        if member is None:
            return
        for event in member.process.events():
            self._take(name, member, event)
        self._dispatch()
        self._retire()

    def _take(self, name: str, member: _Member, event: Event) -> None:
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
            self._died(name, member, event.reason)

    def _answered(self, name: str, member: _Member, event: Answered) -> None:
        batch = self.queue.answered(name, time.monotonic())
        self.metrics.compute_seconds.observe(event.seconds)
        outputs: dict[str, np.ndarray] = event.value
        rows = sum(asked.rows for asked in batch)
        if len(batch) > 1 and not all(value.ndim and len(value) == rows for value in outputs.values()):
            self._note(
                f"the model's answer to {rows} rows has not as many: requests are computed one by one from now on"
            )
            self.queue.most_rows = 1
            self.queue.put_back(batch)
            self._forget_the_gone()
            return
        start = 0
        for pending in member.batch:
            stop = start + pending.asked.rows
            own = {key: value[start:stop] for key, value in outputs.items()} if len(batch) > 1 else outputs
            start = stop
            waited = pending.began - pending.arrived
            _settle(pending, ServedAnswer(own, member.version, name, len(batch), waited, event.seconds))

    def _forget_the_gone(self) -> None:
        """What waits again has a client that still waits."""
        for number in [number for number in self.queue.waiting if number not in self._pending]:
            self.queue.leave(number)

    def _died(self, name: str, member: _Member, reason: str) -> None:
        if not member.started.done():
            member.started.set_exception(CheckpointError(reason))
            return
        self.metrics.deaths.inc()
        given_up = {asked.number for asked in self.queue.remove_process(name)}
        self.metrics.processes.set(len(self.queue.running))
        for pending in member.batch:
            if pending.asked.number in given_up:
                error = RequestError(UNAVAILABLE, "the process that computed this died, and so did the next", 1.0)
                _settle(pending, error)
        self._forget_the_gone()
        member.batch = []
        if not self._closing and member.version == self.queue.version:
            self._note(f"process {name} has ended ({reason}) and is replaced")
            self._spawn(self._replace(name, member))
        else:
            self._drop(name)

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────

    async def load(self) -> int:
        """Loads what the checkpoint is now as a new version, and returns its number."""
        async with self._loading:
            try:
                version = await self._load()
            except PacelineError:
                self.metrics.reloads.labels("failed").inc()
                raise
            self.metrics.reloads.labels("loaded").inc()
            return version

    async def _load(self) -> int:
        self.loaded = identity_of(self.path)
        copy = await asyncio.to_thread(copy_checkpoint, self.path)
        self._versions += 1
        version = self._versions
        self._copies[version] = copy
        names: list[str] = []
        try:
            for cores in self._cores:
                names.append(await self._start(version, cores))
            for found in await asyncio.gather(*(self._members[name].started for name in names), return_exceptions=True):
                if found is not None:
                    raise found
        except BaseException:
            for name in names:
                self._drop(name)
            self._close_copies()
            raise
        for name in names:
            self.queue.add_process(name, version)
        self.queue.version = version
        self.metrics.version.set(version)
        self._dispatch()
        self._retire()
        return version

    async def unload(self) -> None:
        """Has nobody answer any more. What is being computed is still answered; what waits is not."""
        async with self._loading:
            self.queue.version = 0
            for number, pending in list(self._pending.items()):
                if self.queue.leave(number):
                    _settle(pending, RequestError(UNAVAILABLE, "the model was unloaded"))
            self._retire()

    async def _start(self, version: int, cores: Sequence[int]) -> str:
        self._names += 1
        name = f"{version}.{self._names}"
        starter = FromTemplate(self._template, self.path, self._copies[version])
        process = await asyncio.to_thread(ModelProcess, starter, name=name, cores=cores, torch_tensors=False)
        loop = asyncio.get_running_loop()
        self._members[name] = _Member(process, version, [], 0.0, loop.create_future())
        loop.add_reader(process.fileno(), self._heard, name)
        return name

    async def _replace(self, name: str, dead: _Member) -> None:
        """Starts another process in the place of one that died, until one starts or nobody needs it."""
        pause, cores, version = FIRST_PAUSE_S, dead.process.cores, dead.version
        self._drop(name)
        while version == self.queue.version and not self._closing:
            new = None
            try:
                new = await self._start(version, cores)
                await self._members[new].started
            except PacelineError as error:
                if new is not None:
                    self._drop(new)
                self._note(f"a process of version {version} could not be started: {error}")
                await asyncio.sleep(pause)
                pause = min(LONGEST_PAUSE_S, 2 * pause)
                continue
            if version == self.queue.version and not self._closing:
                self.queue.add_process(new, version)
                self._dispatch()
            else:
                self._drop(new)
            self._retire()
            return

    def _retire(self) -> None:
        for name in self.queue.retired():
            self.queue.remove_process(name)
            self._drop(name)
        self.metrics.processes.set(len(self.queue.running))
        self._close_copies()

    def _drop(self, name: str) -> None:
        if (member := self._members.pop(name, None)) is not None:
            asyncio.get_running_loop().remove_reader(member.process.fileno())
            self._spawn(_closed(member.process))

    def _close_copies(self) -> None:
        used = {member.version for member in self._members.values()} | {self.queue.version}
        for version in [version for version in self._copies if version not in used and version < self._versions]:
            os.close(self._copies.pop(version))

    def kill_the_stuck(self) -> None:
        """Kills processes that have been at one batch for longer than anybody waits."""
        now = time.monotonic()
        for name, batch in self.queue.running.items():
            member = self._members[name]
            if batch and now - member.since > self._stuck_s:
                member.process.kill()
                self._died(name, member, f"it had been at one batch for {now - member.since:.0f} s")

    async def close(self) -> None:
        """Ends all processes. What is being computed gets no answer: drain before."""
        self._closing = True
        for name in list(self._members):
            self._drop(name)
        for pending in list(self._pending.values()):
            _settle(pending, RequestError(UNAVAILABLE, "the server is ending"))
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for copy in self._copies.values():
            os.close(copy)
        self._copies = {}

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _closed(process: ModelProcess) -> None:
    await asyncio.to_thread(process.close)


def _settle(pending: _Pending, result: ServedAnswer | RequestError) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):  # its deadline has passed, or its client has gone away
        if isinstance(result, RequestError):
            pending.future.set_exception(result)
        else:
            pending.future.set_result(result)
