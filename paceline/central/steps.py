"""Steps: the chief's decisions, carried out.

Reports come in on many threads. Whichever of them finds that a step can be closed makes it, with all servers, while the
others wait. A report is answered when its step has been made everywhere, so what is acknowledged is there to stay, and
whoever is told about a step can pull it from any server.

Running statistics (BatchNorm's and other buffers) are merged with the step: those of the accepted replicas only,
weighted by their samples.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

import torch

from paceline.central.chief import Chief, Close, End, Outcome, Wait, Work
from paceline.central.connection import Connection
from paceline.central.container import Container
from paceline.central.protocol import (
    Apply,
    Ask,
    Copied,
    Done,
    Ended,
    Freeze,
    Measured,
    Part,
    Report,
    Result,
    Settled,
    Task,
    TaskDone,
    Ticket,
    Waiting,
)
from paceline.central.shards import Option
from paceline.errors import ModelError, PacelineError
from paceline.rules import Async, Rule

ANSWER_WITHIN_S = 2.0  # a wait is answered with `Waiting` at least this often
GRACE_S = 1.0  # for a replica whose connection broke to come back

Options = Sequence[dict[str, Option]]


class Steps:
    """The training of one container, on the server that is its chief."""

    def __init__(self, container: Container, peers: Sequence[Connection]) -> None:
        settings = container.settings
        self.container = container
        self.chief = Chief(
            settings.rule,
            settings.replicas,
            warmup_steps=settings.warmup_steps,
            warmup_epochs=settings.warmup_epochs,
        )
        self.buffers = Buffers()
        self.frozen: list[tuple[str, torch.Tensor]] = []  # parameters that are not trained
        self._checks: list[int] = []
        self._peers = peers
        self._changed = threading.Condition()  # guards the chief and all below
        self._busy = False  # a step is being made, or everything is being copied
        self._failure: BaseException | None = None
        self._options: dict[int, Options] = {}  # by replica: as of its last report
        self._connections: dict[int, int] = {}  # how many each replica has
        self._missing_since: dict[int, tuple[int, float]] = {}
        self._copies = 0
        self._seen = 0  # samples counted so far
        self._frozen_lock = threading.Lock()

    def describe(self, buffers: list[tuple[str, torch.Tensor]], frozen: list[tuple[str, torch.Tensor]]) -> None:
        self.buffers.describe(buffers)
        self.frozen = frozen

    def compare(self, replica: int, checks: list[int]) -> None:
        """All replicas must start from the same parameters, bit by bit."""
        with self._changed:
            if self.chief.step or not checks:
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

    # ── who is there ─────────────────────────────────────────────────────────────────────────────────────

    def join(self, replica: int, incarnation: int) -> None:
        with self._changed:
            if not 0 <= replica < self.container.settings.replicas:
                raise PacelineError(
                    f"replica is {replica}: this container has places for {self.container.settings.replicas}"
                )
            self.chief.join(replica, incarnation)
            self._connections[replica] = self._connections.get(replica, 0) + 1
            self._missing_since.pop(replica, None)
            self._changed.notify_all()

    def lost(self, replica: int, incarnation: int, *, at_once: bool) -> None:
        """A connection of that replica has ended; without another it will be taken off the list."""
        with self._changed:
            self._connections[replica] -= 1
            if self._connections[replica] or not self.chief.is_member(replica, incarnation):
                return
            self._missing_since[replica] = (incarnation, time.monotonic() - (GRACE_S if at_once else 0.0))
        self.look_for_missing()

    def leave(self, replica: int, incarnation: int) -> None:
        with self._changed:
            self.chief.leave(replica, incarnation or None)
            self._missing_since.pop(replica, None)
            self._changed.notify_all()
        self._close_steps()

    def look_for_missing(self) -> None:
        """Called now and then: whoever has not come back in time has left."""
        now = time.monotonic()
        with self._changed:
            gone = [
                (replica, incarnation)
                for replica, (incarnation, since) in self._missing_since.items()
                if now - since >= GRACE_S
            ]
        for replica, incarnation in gone:
            self.leave(replica, incarnation)

    def stop(self) -> None:
        with self._changed:
            self.chief.stopping = True
            self._changed.notify_all()

    def set_rule(self, rule: Rule) -> None:
        with self._changed:
            self.chief.set_rule(rule)
            self._changed.notify_all()
        self._close_steps()

    def _check(self, replica: int, incarnation: int) -> None:
        if not self.chief.is_member(replica, incarnation):
            # It was taken off the list, because its connection was gone for too long, and is back.
            self.chief.join(replica, incarnation)
        if self._failure is not None:
            raise PacelineError(str(self._failure)) from self._failure

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, request: Ask) -> Ticket | Ended | Waiting:
        give_up = time.monotonic() + ANSWER_WITHIN_S
        with self._changed:
            self._check(request.replica, request.incarnation)
            self.chief.begin(request.chapter, request.length, request.batch_size, request.left_out)
            while True:
                self._check(request.replica, request.incarnation)
                answer = self.chief.ask(request.replica, request.chapter, request.stop_epoch, time.monotonic())
                if isinstance(answer, Work):
                    return self._ticket(answer)
                if isinstance(answer, End) and not self._busy:
                    return Ended(step=self.chief.step, stop=answer.stop, loss=self.chief.last.loss)
                if not self._changed.wait(give_up - time.monotonic()):
                    return Waiting(why=answer.why if isinstance(answer, Wait) else "the servers to update")

    def _ticket(self, work: Work) -> Ticket:
        return Ticket(
            ticket=work.ticket,
            step=work.step,
            epoch=work.epoch,
            runs=[(run.start, run.stop) for run in work.runs],
            part=work.part,
            exact=work.exact,
            sync=not isinstance(self.chief.rule, Async),
        )

    def report(self, request: Report, buffers: bytes) -> Settled | Ticket | Waiting:
        replica, give_up = request.replica, time.monotonic() + ANSWER_WITHIN_S
        with self._changed:
            self._check(replica, request.incarnation)
            self._options[replica] = request.options
            self.buffers.put(replica, buffers)
            self.chief.report(replica, request.ticket, request.pulled, request.loss, time.monotonic())
            self._changed.notify_all()
        self._close_steps()
        with self._changed:
            while True:
                self._check(replica, request.incarnation)
                outcome = self.chief.outcome(replica, request.ticket)
                if outcome is not None:
                    return self._settled(replica, outcome)
                more = self.chief.more(replica, time.monotonic())
                if more is not None:
                    return self._ticket(more)
                if not self._changed.wait(give_up - time.monotonic()):
                    return Waiting(why=self.chief.waits(replica))

    def _settled(self, replica: int, outcome: Outcome) -> Settled:
        return Settled(
            accepted=outcome.step,
            step=self.chief.step,
            loss=outcome.loss,
            samples=outcome.samples,
            replicas=len(self.chief.members),
            chief=replica == min(self.chief.members),
            seen=self._seen,
        )

    # ── closing ──────────────────────────────────────────────────────────────────────────────────────────

    def _close_steps(self) -> None:
        """Make every step that can be made; one thread does, the others find it busy."""
        while True:
            with self._changed:
                if self._busy or self._failure is not None:
                    return
                close = self.chief.next_close()
                if close is None:
                    self._changed.notify_all()  # somebody's ticket may have been dropped
                    return
                options = self._options[close.accepted[-1].replica]
                self._busy = True
            failure: BaseException | None = None
            try:
                self._make(close, options)
            except BaseException as error:
                failure = error
            with self._changed:
                self._busy = False
                if failure is not None:
                    self._failure = failure
                else:
                    self.buffers.merge(close)
                    self.chief.closed(close)
                    self._seen += close.samples
                self._changed.notify_all()

    def _make(self, close: Close, options: Options) -> None:
        name, scale = self.container.name, 1.0
        clip_norm = self.container.settings.clip_norm
        if clip_norm is not None:
            ask = Apply(container=name, close=close, options=list(options), measure=True)
            squared = self._with_all(ask, Measured, lambda: Measured(squared=self.container.squared_norm(close)))
            length = math.sqrt(math.fsum(measured.squared for measured in squared))
            scale = min(1.0, clip_norm / (length + 1e-6))
        apply = Apply(container=name, close=close, options=list(options), scale=scale)

        def own() -> Done:
            self.container.apply(close, options, scale)
            return Done()

        self._with_all(apply, Done, own)

    def _with_all(self, request: Apply | Freeze, expected: type, own: Callable[[], object]) -> list:  # type: ignore[type-arg]
        """The same on every server, at the same time."""
        if not self._peers:
            return [own()]
        answers: list[object] = [None] * len(self._peers)
        failures: list[BaseException] = []

        def tell(index: int, peer: Connection) -> None:
            try:
                answers[index] = peer.call(request, expected)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=tell, args=pair, daemon=True) for pair in enumerate(self._peers)]
        for thread in threads:
            thread.start()
        first = own()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return [first, *answers]

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────

    def task(self, request: Task) -> Part | Result | Waiting:
        give_up = time.monotonic() + ANSWER_WITHIN_S
        with self._changed:
            while True:
                self._check(request.replica, request.incarnation)
                answer = self.chief.ask_task(request.replica, request.name, request.length)
                if isinstance(answer, tuple):
                    part, runs = answer
                    return Part(part=part, start=runs[0].start, stop=runs[-1].stop)
                if isinstance(answer, list):
                    return Result(values=answer, chief=request.replica == min(self.chief.members))
                if not self._changed.wait(give_up - time.monotonic()):
                    return Waiting(why=f"{answer.why} ({request.name})")

    def task_done(self, request: TaskDone) -> Done:
        with self._changed:
            self._check(request.replica, request.incarnation)
            self.chief.finish_task(request.replica, request.name, request.part, request.values)
            self._changed.notify_all()
        return Done()

    # ── everything, as of one step ───────────────────────────────────────────────────────────────────────

    def freeze(self) -> Copied:
        """Have every server keep a copy of what it has, all after the same step."""
        with self._changed:
            while self._busy:
                self._changed.wait()
            self._busy = True
            self._copies += 1
            number = self._copies
        try:

            def own() -> Copied:
                return Copied(number=number, step=self.container.freeze(number).step)

            self._with_all(Freeze(container=self.container.name, number=number), Copied, own)
            return Copied(number=number, step=self.chief.step)
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
            self._close_steps()

    def notes(self) -> dict[str, object]:
        with self._changed:
            return self.chief.state()

    def load_notes(self, notes: dict[str, object]) -> None:
        with self._changed:
            self.chief.load(notes)

    def close(self) -> None:
        with self._changed:
            self._failure = self._failure or PacelineError(f"container {self.container.name!r} was dropped")
            self._changed.notify_all()
        for peer in self._peers:
            peer.close()


class Buffers:
    """The model's buffers: one copy, and what each replica has made of it."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, torch.Tensor]] = []
        self._given: dict[int, bytes] = {}

    def describe(self, entries: list[tuple[str, torch.Tensor]]) -> None:
        self._entries = entries

    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return self._entries

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for _, tensor in self._entries)

    def put(self, replica: int, given: bytes) -> None:
        if len(given) not in (0, self.size):
            raise PacelineError(f"replica {replica} reports {len(given)} bytes of buffers instead of {self.size}")
        self._given[replica] = given

    def packed(self) -> list[memoryview]:
        return [tensor.contiguous().view(-1).view(torch.uint8).numpy().data for _, tensor in self._entries]

    def merge(self, close: Close) -> None:
        if not self._entries or not all(self._given.get(accepted.replica) for accepted in close.accepted):
            return
        offset = 0
        for _, tensor in self._entries:
            parts = []
            for accepted in close.accepted:
                raw = bytearray(self._given[accepted.replica][offset : offset + tensor.nbytes])
                parts.append(torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape) if raw else tensor)
            if tensor.is_floating_point():
                weights = [accepted.samples / close.samples for accepted in close.accepted]
                mean = torch.stack([part * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)
                tensor.copy_(mean)
            elif parts:
                tensor.copy_(torch.stack(parts).amax(0))
            offset += tensor.nbytes
