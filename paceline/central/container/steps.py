"""Steps: the chief's decisions, carried out.

Reports come in on many threads. Whichever of them finds that a step can be closed makes it, with all servers, while the
others wait. A report is answered when its step has been made everywhere, so what is acknowledged is there to stay, and
whoever is told about a step can pull it from any server.

Running statistics (BatchNorm's and other buffers) are merged with the step: those of the accepted replicas only,
weighted by their samples.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from paceline.central.chief.books import Books
from paceline.central.chief.chief import Chief
from paceline.central.chief.tickets import Close, End, Outcome, Wait, Work
from paceline.central.container.bounds import check_ask, check_count, check_options, check_place
from paceline.central.container.buffers import ModelBuffers
from paceline.central.container.container import Container
from paceline.central.durability import snapshot as keeping
from paceline.central.shards import Option, Spec
from paceline.central.wire.connection import Connection
from paceline.central.wire.notes import ChiefNotes
from paceline.central.wire.protocol import (
    Apply,
    Ask,
    Copied,
    Copy,
    Done,
    Drop,
    Ended,
    Freeze,
    GiveBack,
    Message,
    Report,
    Result,
    Settled,
    SquaredNorm,
    Task,
    TaskDone,
    TaskPart,
    Thaw,
    Ticket,
    Waiting,
)
from paceline.central.wire.records import AnyRecord, ChapterShape, Made, MembersChanged, RuleSet, TaskResult, packed
from paceline.central.wire.settings import Settings
from paceline.errors import CheckpointError, ModelError, PacelineError, Stalled
from paceline.rules import Async, Rule

ANSWER_WITHIN_S = 2.0  # a wait is answered with `Waiting` at least this often
GRACE_S = 1.0  # for a replica whose connection broke to come back
BACK_WITHIN_S = 10.0  # for all of them, when it is this server that was gone

Options = Sequence[dict[str, Option]]


class ContainerTraining:
    """The training of one container, on the server that is its chief."""

    def __init__(self, container: Container, peers: Sequence[Connection], *, first_ticket: int = 1) -> None:
        self.container = container
        self._first_ticket = first_ticket
        self.chief = self._new_chief()
        self.buffers = ModelBuffers()
        self.frozen: list[tuple[str, torch.Tensor]] = []  # parameters that are not trained
        self.keys: list[tuple[str, str]] = []  # of the model's state_dict, and which tensor each is
        self._checks: list[int] = []
        self._peers = peers
        self._changed = threading.Condition()  # guards the chief and all below
        self._busy = False  # a step is being made, or everything is being copied
        self._behind = False  # another server may not have made the last step yet
        self._making = False  # a step is decided: the parameters may have it, and the books have not
        self._last: Made | None = None  # the last step that was decided, if there is a journal
        self._chapters: dict[int, ChapterShape] = {}
        self._noted_members: dict[int, int] = {}
        self._failure: BaseException | None = None
        self._options: dict[int, Options] = {}  # by replica: as of its last report
        self._connections: dict[int, int] = {}  # how many each replica has
        self._missing_since: dict[int, tuple[int, float]] = {}
        self._copies = 0
        self._seen = 0  # samples counted so far
        self._trained = False  # whether this run has made a step

    def _new_chief(self) -> Chief:
        settings = self.container.settings
        return Chief(
            settings.rule,
            settings.replicas,
            warmup_steps=settings.warmup_steps,
            warmup_epochs=settings.warmup_epochs,
            first_ticket=self._first_ticket,
        )

    def describe(
        self,
        buffers: list[tuple[str, torch.Tensor]],
        frozen: list[tuple[str, torch.Tensor]],
        keys: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.buffers.describe(buffers)
        self.frozen = frozen
        self.keys = list(keys)

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

    @property
    def members(self) -> list[int]:
        """Replicas that are there: have come, and not left."""
        with self._changed:
            return [replica for replica, incarnation in sorted(self.chief.members.items()) if incarnation]

    def reopen(self, spec: Spec, settings: Settings, peers: Sequence[Connection]) -> None:
        """Another run goes on with this container, if nobody is at it any more."""
        give_up = time.monotonic() + 3 * GRACE_S  # those of the run before may just be leaving
        with self._changed:
            while self.container.settings.run != settings.run and (self._busy or self.members):
                if not self._changed.wait(give_up - time.monotonic()) and time.monotonic() >= give_up:
                    raise PacelineError(
                        f"container {self.container.name!r} is being trained by another run, replicas "
                        f"{', '.join(map(str, self.members))}: wait for its end, or give another name"
                    )
            if self.container.settings.run == settings.run:
                return  # another replica of this run was first
            self.container.reopen(spec, settings)
            books = self.chief.books()
            # What was measured is still true; what was saved was saved for another run.
            results = [(key, sums) for key, sums in books.results if key.holds_for_later_runs]
            self.chief = self._new_chief()
            self.chief.load(msgspec.structs.replace(books, results=results))
            self._connections.clear()
            self._missing_since.clear()
            self._options.clear()
            self._checks = []
            self._trained = False
            self._last = None
            for peer in self._peers:
                peer.close()
            self._peers = peers

    def join(self, replica: int, incarnation: int) -> None:
        with self._changed:
            check_place(replica, self.container.settings.replicas)
            self.chief.join(replica, incarnation)
            self._note_members()
            self._connections[replica] = self._connections.get(replica, 0) + 1
            self._missing_since.pop(replica, None)
            self._changed.notify_all()

    def lost(self, replica: int, incarnation: int, *, at_once: bool) -> None:
        """A connection of that replica has ended; without another it will be taken off the list."""
        with self._changed:
            if replica not in self._connections:
                return  # of a run before this one
            self._connections[replica] -= 1
            if self._connections[replica] or not self.chief.is_member(replica, incarnation):
                return
            self._missing_since[replica] = (incarnation, time.monotonic() - (GRACE_S if at_once else 0.0))
        self.look_for_missing()

    def leave(self, replica: int, incarnation: int) -> None:
        with self._changed:
            self.chief.leave(replica, incarnation or None)
            self._note_members()
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
            self._note(RuleSet(rule=rule))
            self._changed.notify_all()
        self._flush()
        self._close_steps()

    def _check(self, replica: int, incarnation: int) -> None:
        check_place(replica, self.container.settings.replicas)
        if not self.chief.is_member(replica, incarnation):
            # It was taken off the list, because its connection was gone for too long, and is back.
            self.chief.join(replica, incarnation)
            self._note_members()
        if self._failure is not None:
            raise PacelineError(str(self._failure)) from self._failure

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, request: Ask) -> Ticket | Ended | Waiting:
        give_up = time.monotonic() + (0.0 if request.at_once else ANSWER_WITHIN_S)
        with self._changed:
            while True:
                self._check(request.replica, request.incarnation)
                if self._behind and self._changed.wait(give_up - time.monotonic()):
                    continue
                if self._behind:
                    return Waiting(why="another server, which was started again")
                answer = self._work_for(request)
                if isinstance(answer, Work):
                    return self._ticket(answer)
                if isinstance(answer, End) and not self._busy:
                    return Ended(step=self.chief.step, stop=answer.stop, loss=self.chief.last.loss)
                if not self._changed.wait(give_up - time.monotonic()):
                    return Waiting(why=answer.why if isinstance(answer, Wait) else "the servers to update")

    def _work_for(self, request: Ask) -> Work | Wait | End:
        check_ask(request)
        self.chief.begin(request.chapter, request.length, request.batch_size, request.left_out)
        self._chapters[request.chapter] = (request.length, request.batch_size, request.left_out)
        return self.chief.ask(request.replica, request.chapter, request.stop_epoch, time.monotonic())

    def give_back(self, request: GiveBack) -> Done:
        with self._changed:
            self._check(request.replica, request.incarnation)
            self.chief.give_back(request.replica, request.ticket)
            self._changed.notify_all()
        self._close_steps()
        return Done()

    def buffers_now(self) -> list[memoryview]:
        """The buffers, all as they were after one step: another may be made while they are sent."""
        with self._changed:
            return [memoryview(bytes(packed)) for packed in self.buffers.packed()]

    def _ticket(self, work: Work) -> Ticket:
        following = work.following
        return Ticket(
            ticket=work.ticket,
            step=work.step,
            epoch=work.epoch,
            runs=[(run.start, run.stop) for run in work.runs],
            part=work.part,
            exact=work.exact,
            sync=not isinstance(self.chief.rule, Async),
            needed=self.chief.accepting,
            following=None if following is None else (following[0], [(run.start, run.stop) for run in following[1]]),
        )

    def report(self, request: Report, buffers: bytes) -> Settled | Ticket | Waiting:
        replica, give_up = request.replica, time.monotonic() + ANSWER_WITHIN_S
        check_options(request.options, self.container.spec.optimizer.groups)
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
                if self._behind and self._changed.wait(give_up - time.monotonic()):
                    continue
                if self._behind:
                    return Waiting(why="another server, which was started again")
                outcome = self.chief.outcome(replica, request.ticket)
                if outcome is not None:
                    return self._settled(replica, outcome, request.ask)
                more = self.chief.more(replica, time.monotonic())
                if more is not None:
                    return self._ticket(more)
                if not self._changed.wait(give_up - time.monotonic()):
                    return Waiting(why=self.chief.waits(replica))

    def _settled(self, replica: int, outcome: Outcome, ask: Ask | None) -> Settled:
        coming = self._work_for(ask) if ask is not None and ask.replica == replica else None
        return Settled(
            accepted=outcome.step,
            step=self.chief.step,
            loss=outcome.loss,
            samples=outcome.samples,
            replicas=len(self.chief.members),
            chief=replica == min(self.chief.members),
            seen=self._seen,
            next=self._ticket(coming) if isinstance(coming, Work) else None,
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
                self._busy = self._making = False
                if failure is not None:
                    self._failure = failure
                else:
                    self.buffers.merge(close)
                    self.chief.closed(close)
                    self._seen += close.samples
                    self._trained = True
                    journal = self.container.journal
                    if journal is not None and journal.due:
                        self.save(wait=False)
                self._changed.notify_all()

    def _make(self, close: Close, options: Options) -> None:
        name, scale = self.container.name, 1.0
        clip_norm = self.container.settings.clip_norm
        if clip_norm is not None:
            ask = Apply(container=name, close=close, options=list(options), measure=True)
            squared = self._with_all(ask, SquaredNorm, lambda: SquaredNorm(squared=self.container.squared_norm(close)))
            length = math.sqrt(math.fsum(measured.squared for measured in squared))
            scale = min(1.0, clip_norm / (length + 1e-6))
        apply = Apply(container=name, close=close, options=list(options), scale=scale)
        # What is decided is noted before anybody acts on it: whoever follows this process, decides the same.
        if self.container.journal is not None:
            chapter = self._chapters.get(close.chapter)
            made = Made(close=close, options=list(options), scale=scale, chapter=chapter)
            self.container.note(made, packed(self.buffers.merged(close)))
            self._flush()
            with self._changed:
                self._making, self._last = True, made

        def own() -> Done:
            self.container.apply(close, options, scale, noted=True)
            return Done()

        self._with_all(apply, Done, own)

    def _with_all(self, request: Message, expected: type, own: Callable[[], object]) -> list:  # type: ignore[type-arg]
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

    def task(self, request: Task) -> TaskPart | Result | Waiting:
        check_count("dataset length", request.length)
        give_up = time.monotonic() + ANSWER_WITHIN_S
        with self._changed:
            while True:
                self._check(request.replica, request.incarnation)
                if self._trained and request.key.over_after_a_step:
                    # It was started again, and runs the script from the top: all that lies behind.
                    return Result(values=[], chief=request.replica == min(self.chief.members))
                answer = self.chief.ask_task(request.replica, request.key, request.length)
                if isinstance(answer, tuple):
                    part, runs = answer
                    return TaskPart(part=part, start=runs[0].start, stop=runs[-1].stop)
                if isinstance(answer, list):
                    return Result(values=answer, chief=request.replica == min(self.chief.members))
                if not self._changed.wait(give_up - time.monotonic()):
                    return Waiting(why=f"{answer.why} ({request.key.words})")

    def task_done(self, request: TaskDone) -> Done:
        with self._changed:
            self._check(request.replica, request.incarnation)
            known = request.key in self.chief.tasks.results
            self.chief.tasks.finish(request.replica, request.key, request.part, request.values)
            result = self.chief.tasks.results.get(request.key)
            if result is not None and not known:
                self._note(TaskResult(key=request.key, values=result))
            self._changed.notify_all()
        self._flush()
        return Done()

    # ── everything, as of one step ───────────────────────────────────────────────────────────────────────

    def freeze(self) -> Copied:
        """Have every server keep a copy of what it has, all after the same step."""
        give_up = time.monotonic() + self.container.settings.timeout_s
        with self._changed:
            while self._busy:
                if not self._changed.wait(give_up - time.monotonic()):
                    raise Stalled(f"waited {self.container.settings.timeout_s:g} s for step {self.chief.step} to close")
            self._busy = True
            self._copies += 1
            number = self._copies
            books = self.chief.books()
        try:

            def own() -> Copied:
                extras = [*self.buffers.tensors, *self.frozen]
                return Copied(number=number, step=self.container.freeze(number, extras, books).step)

            self._with_all(Freeze(container=self.container.name, number=number), Copied, own)
            return Copied(number=number, step=self.chief.step)
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
            self._close_steps()

    def copy(self, to: str, take: Callable[[int], Done], drop: Callable[[], Done]) -> None:
        """Make another container on every server. `take` and `drop` are this server's part in that."""
        number = self.freeze().number
        try:
            self._with_all(Copy(container=self.container.name, to=to, number=number), Done, lambda: take(number))
        except BaseException:
            with contextlib.suppress(PacelineError):
                self._with_all(Drop(container=to, force=True), Done, drop)
            raise
        finally:
            self._with_all(
                Thaw(container=self.container.name, number=number), Done, lambda: self.container.thaw(number)
            )

    def abandon(self) -> None:
        """Nobody is expected: this is a copy, and whoever wants to train it says so."""
        with self._changed:
            for replica in list(self.chief.members):
                self.chief.leave(replica)

    def books(self) -> Books:
        with self._changed:
            return self.chief.books()

    def take_books(self, books: Books, values: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        """Take over the books of another chief; and new `values` of buffers, and of what is not trained."""
        with self._changed:
            self.chief.load(books)
            self._last = None
            for tensor, value in values:
                tensor.copy_(value)

    # ── the journal ──────────────────────────────────────────────────────────────────────────────────────

    def _note(self, record: AnyRecord) -> None:
        journal = self.container.journal
        if journal is not None:
            journal.write(record, journal.seal(record, ()))

    def _flush(self) -> None:
        """What was noted is where it survives this process. Not with the lock held: a journal may need that."""
        if self.container.journal is not None:
            self.container.journal.flush()

    def _note_members(self) -> None:
        if self.chief.members != self._noted_members:
            self._noted_members = dict(self.chief.members)
            self._note(MembersChanged(members=self._noted_members))

    def save(self, *, wait: bool) -> None:
        """Have everything in a snapshot, from which the journal goes on."""
        with self._changed:
            while self._making:
                self._changed.wait()
            tensors, notes = self.whole()
            keeping.save(self.container, tensors, notes, wait=wait)

    def whole(self) -> tuple[dict[str, torch.Tensor], ChiefNotes]:
        """What a snapshot of the chief has besides those of other servers."""
        with self._changed:
            tensors = {f"buffer/{name}": tensor.clone() for name, tensor in self.buffers.tensors}
            tensors |= {f"frozen/{name}": tensor.clone() for name, tensor in self.frozen}
            return tensors, ChiefNotes(
                books=self.chief.books(),
                rule=self.chief.rule,
                members=dict(self.chief.members),
                chapters=dict(self._chapters),
                trained=self._trained,
                buffers=[name for name, _ in self.buffers.tensors],
                frozen=[name for name, _ in self.frozen],
                keys=self.keys,
                last=self._last,
            )

    def load(self, tensors: Mapping[str, torch.Tensor], notes: ChiefNotes) -> None:
        """Go on from a snapshot."""
        with self._changed:
            buffers = [(name, tensors[f"buffer/{name}"]) for name in notes.buffers]
            frozen = [(name, tensors[f"frozen/{name}"]) for name in notes.frozen]
            self.describe(buffers, frozen, notes.keys)
            self.chief.load(notes.books)
            self.chief.set_rule(notes.rule)
            self._chapters = dict(notes.chapters)
            self._seen = sum(self.chief.book(number).counted for number in notes.books.chapters)
            self._trained, self._last = notes.trained, notes.last
            self._take_members(notes.members)

    def again(self, record: Made | TaskResult | RuleSet | MembersChanged, body: memoryview) -> None:
        """What the journal has since then."""
        with self._changed:
            match record:
                case Made():
                    if record.chapter is None:
                        raise CheckpointError(f"step {record.close.step} in the log is not that of a chief")
                    self.chief.replay(record.close, *record.chapter)
                    self._chapters[record.close.chapter] = record.chapter
                    self._seen += record.close.samples
                    self._trained = True
                    self._last = record
                    self.buffers.unpack(body)
                case TaskResult():
                    self.chief.tasks.results[record.key] = record.values
                case RuleSet():
                    self.chief.set_rule(record.rule)
                case MembersChanged():
                    self._take_members(record.members)

    def _take_members(self, members: Mapping[int, int]) -> None:
        self.chief.members.clear()
        for replica, incarnation in members.items():
            if incarnation:
                self.chief.join(replica, incarnation)
            else:
                self.chief.members[replica] = 0
        self._noted_members = dict(members)

    def go_on(self) -> None:
        """Take up the work of the process before, which may have died before all servers had made its last step.

        Nobody is answered before they have: who is told of a step may rely on it.
        """
        until = time.monotonic() + BACK_WITHIN_S - GRACE_S
        with self._changed:
            self._missing_since = {replica: (held, until) for replica, held in self.chief.members.items()}
            last = self._last
            if last is None or not self._peers:
                return
            self._busy = self._behind = True
        threading.Thread(target=self._tell_again, args=(last,), daemon=True).start()

    def _tell_again(self, last: Made) -> None:
        apply = Apply(container=self.container.name, close=last.close, options=last.options, scale=last.scale)
        failure: BaseException | None = None
        try:
            self._with_all(apply, Done, Done)
        except BaseException as error:
            failure = error
        with self._changed:
            self._failure = self._failure or failure
            self._busy = self._behind = False
            self._changed.notify_all()
        self._close_steps()

    def close(self) -> None:
        with self._changed:
            self._failure = self._failure or PacelineError(f"container {self.container.name!r} was dropped")
            self._changed.notify_all()
        for peer in self._peers:
            peer.close()
