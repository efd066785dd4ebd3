"""One connection to a server: reads a request, has it done, replies."""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from paceline.central.container.bounds import check_books, check_count
from paceline.central.container.container import Container
from paceline.central.container.step_maker import States
from paceline.central.container.training import ANSWER_WITHIN_S, ContainerTraining
from paceline.central.messages import replies, requests
from paceline.central.messages.coding import Coding
from paceline.central.messages.records import Pushed, RowsPut
from paceline.central.messages.tensor_bytes import OTHER_TYPES, bytes_of, entries_of, type_name
from paceline.central.shards import DTYPES
from paceline.central.tables.tables import Rows
from paceline.errors import PacelineError
from paceline.machine import machine_identity
from paceline.net.frames import Channel, ConnectionLost, FrameError

if TYPE_CHECKING:
    from paceline.central.server.server import Server

SMALL_BODY_BYTES = 1 << 28  # buffers, notes
PAUSE_S = 0.01
SKIP_WITHIN_S = 60.0  # for the rest of a request that is refused

Body = Iterable[memoryview]
Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Answer:
    """A reply and its body. With `body_bytes` the body is made while it is sent."""

    reply: replies.Reply
    body: Body = ()
    body_bytes: int | None = None
    then: Callable[[], None] | None = None  # what is left to do when it is sent


class Session:
    """Serves one connection that has shown the token."""

    def __init__(self, server: Server, channel: Channel[requests.Request]) -> None:
        self._server = server
        self._channel = channel
        self._joined: tuple[ContainerTraining, int, int] | None = None
        self._same_machine = False
        self._length = 0  # of the body of the request that is being answered
        self._gradient: torch.Tensor | None = None  # room for one that is being received
        self._room = bytearray()  # for records of another server

    def gone(self) -> None:
        if self._joined is not None:
            training, replica, incarnation = self._joined
            # On one machine nothing but the end of a process ends a connection.
            training.lost(replica, incarnation, at_once=self._same_machine)

    def serve(self) -> None:
        while True:
            request, self._length = self._channel.receive()
            try:
                answer = self._answer(request)
                self._channel.end_body()
            except (FrameError, ConnectionLost):
                raise
            except PacelineError as error:
                answer = self._refuse(str(error))
            except Exception as error:
                self._server.say(f"{type(request).__name__} failed:\n{traceback.format_exc()}")
                answer = self._refuse(f"the server failed on {type(request).__name__}: {error}")
            self._channel.send(answer.reply, answer.body, body_bytes=answer.body_bytes)
            if answer.then is not None:
                answer.then()

    def _refuse(self, sentence: str) -> Answer:
        self._channel.skip_body(SKIP_WITHIN_S)
        return Answer(replies.Refused(sentence=sentence))

    def _answer(self, request: requests.Request) -> Answer:
        if isinstance(request, requests.OfAnotherServer):
            return self._of_another_server(request)  # which may be what this one waits for
        self._server.recovered.wait()
        server = self._server
        match request:
            case requests.Ask():
                training = self._run(request.container)
                reply = training.ask(request)
                if isinstance(reply, replies.Waiting) and not request.at_once:
                    server.refuse_circle(training, request)
                return Answer(reply, () if isinstance(reply, replies.Waiting) else training.buffers_now())
            case requests.Report():
                training, buffers = self._run(request.container), self._channel.read_whole_body(SMALL_BODY_BYTES)
                settled = training.report(request, bytes(buffers))
                # Also to whoever has nothing to do next: it may evaluate, or save.
                return Answer(settled, training.buffers_now() if isinstance(settled, replies.Settled) else ())
            case requests.GiveBack():
                self._run(request.container).give_back(request)
            case requests.Push():
                self._push(request)
            case requests.Pull():
                return self._pull(request)
            case requests.Look():
                return self._look(request)
            case requests.PullRows():
                return self._pull_rows(request)
            case requests.PutRows():
                self._put_rows(request)
            case requests.Open():
                return Answer(self._open(request))
            case requests.Fill():
                self._fill(request)
            case requests.Task():
                return Answer(self._run(request.container).task(request))
            case requests.TaskDone():
                self._run(request.container).task_done(request)
            case requests.TaskGivenBack():
                self._run(request.container).task_given_back(request)
            case requests.Apply():
                return Answer(self._apply(request))
            case requests.Leave():
                self._run(request.container).leave(request.replica, request.incarnation)
            case requests.Stop():
                self._run(request.container).stop()
            case requests.SetRule():
                self._run(request.container).set_rule(request.rule)
            case requests.ReadBuffers():
                extras = server.runs(request.container).extras
                return _named(extras.frozen if request.frozen else extras.buffers.tensors)
            case requests.Describe():
                return Answer(server.description(request.container))
            case requests.Freeze():
                if request.number:
                    step = server.container(request.container).freeze(request.number).step
                    return Answer(replies.Copied(number=request.number, step=step))
                return Answer(server.runs(request.container).closer.freeze(self._run(request.container).state))
            case requests.ReadFrozen():
                return self._frozen(request)
            case requests.Thaw():
                server.container(request.container).thaw(request.number)
            case requests.Restore():
                self._restore(request)
            case requests.ReadBooks():
                return Answer(self._books(request))
            case requests.Containers():
                return Answer(replies.Listed(containers=server.listing()))
            case requests.Drop():
                server.drop(request.container, force=request.force)
            case requests.Copy():
                server.copy(request)
            case requests.Vacate():
                server.container(request.container).vacate(request.places)
            case _:
                raise PacelineError(f"{type(request).__name__} is not understood here")
        return Answer(replies.Done())

    def _run(self, container: str) -> ContainerTraining:
        """Return the run that this connection is of; of whoever is no replica, the one that came last."""
        if self._joined is not None and self._joined[0].container.name == container:
            return self._joined[0]
        return self._server.runs(container).latest

    # ── opening, and initial values ──────────────────────────────────────────────────────────────────────

    def _open(self, request: requests.Open) -> replies.Opened:
        container = self._server.open(request)
        shared, first, made = request.machine == machine_identity(), request.first or 0, 0
        training = self._server.runs(request.container).find(request.settings.run) if request.server == 0 else None
        if training is not None:
            first, made = training.state.first, training.state.chief.step
        place = first + request.replica
        container.connect(place, request.incarnation, self, shared=shared)
        if training is not None:
            training.compare(request.replica, request.checks)
            training.presence.join(request.replica, request.incarnation)
            if self._joined is not None:
                self.gone()
            self._joined = (training, request.replica, request.incarnation)
        self._same_machine = shared
        arena = container.arena
        return replies.Opened(
            step=container.step,
            filled=container.filled,
            reopened=container.reopened,
            first=first,
            made=made,
            arena=(os.getpid(), arena.arena.descriptor) if shared else None,
            place=(os.getpid(), arena.places[place].descriptor) if shared else None,
            tables=[(os.getpid(), table.arena.descriptor) for table in container.tables] if shared else [],
        )

    def _fill(self, request: requests.Fill) -> None:
        container = self._server.container(request.container)
        if container.filled:
            self._channel.skip_body(SKIP_WITHIN_S)  # said twice: training may have gone on meanwhile
            return
        flat = self._read_tensor("uint8", (container.layout.bytes,))
        buffers, frozen = (
            [(name, self._read_tensor(dtype, shape)) for name, dtype, shape in described]
            for described in (request.buffers, request.frozen)
        )
        self._channel.end_body()
        if container.server == 0:
            self._server.runs(request.container).extras.describe(buffers, frozen, request.keys)
        with container.lock:
            container.arena.parameters.copy_(flat)
            container.fill()
        self._server.save(request.container)

    def _read_tensor(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        kind = DTYPES.get(dtype) or OTHER_TYPES.get(dtype)
        if kind is None:
            raise PacelineError(f"{dtype!r} is not a type of tensors that can be sent")
        if not (min(shape, default=0) >= 0 and math.prod(shape) * kind.itemsize <= self._length):
            raise PacelineError(f"a tensor of shape {shape} is not in a body of {self._length} bytes")
        tensor = torch.empty(shape, dtype=kind)
        self._channel.read_body(bytes_of(tensor))
        return tensor

    # ── gradients and parameters ─────────────────────────────────────────────────────────────────────────

    def _push(self, request: requests.Push) -> None:
        container = self._server.container(request.container)
        container.check_push(request.replica, request.incarnation, request.ticket, self)
        received = None
        if not request.shared:
            # Not into its place: what is there counts until all of this has come, and is found to be in order.
            received, self._gradient = self._gradient, None
            if received is None or received.numel() != container.layout.bytes:
                received = torch.empty(container.layout.bytes, dtype=torch.uint8)
            Coding(container.layout, request.wire).read(self._channel, received, container.layout.chunks)
        untouched = request.untouched
        if request.marks:
            marks = self._read_tensor("uint8", (len(container.layout.slots),))
            untouched = [slot for slot, touched in enumerate(marks.tolist()) if not touched]
        rows = self._read_rows(container, request.rows) if request.rows else []
        self._channel.end_body()
        pushed = Pushed(
            replica=request.replica,
            incarnation=request.incarnation,
            ticket=request.ticket,
            untouched=untouched,
            rows=request.rows,
        )
        self._gradient = container.push(pushed, received, rows, self)

    def supersede(self) -> None:
        """The replica has another connection: nothing that is still under way on this one counts."""
        self._channel.interrupt()

    def _read_rows(self, container: Container, counts: list[int]) -> list[Rows]:
        if len(counts) != len(container.tables):
            raise PacelineError(f"rows of {len(counts)} tables do not fit {len(container.tables)}")
        found = []
        for table, count in zip(container.tables, counts, strict=True):
            ids = self._read_tensor("int64", (count,))
            found.append(Rows(ids, self._read_tensor("float32", (count, table.spec.width))))
        return found

    def _pull_rows(self, request: requests.PullRows) -> Answer:
        container = self._server.container(request.container)
        table = _one_of(container.tables, request.table)
        ids = self._read_tensor("int64", (self._length // 8,))
        table.check_rows(ids)
        if (waiting := _await_step(container, request.at_least)) is not None:
            return Answer(waiting)
        with container.lock:
            step, values = container.step, table.weight.index_select(0, ids)
        return Answer(replies.Pulled(step=step), [bytes_of(values)])

    def _put_rows(self, request: requests.PutRows) -> None:
        container = self._server.container(request.container)
        table = _one_of(container.tables, request.table)
        if not (request.start >= 0 and request.rows >= 0 and request.start + request.rows <= table.rows):
            raise PacelineError(f"rows {request.start} to {request.start + request.rows} of {table.spec.name}: no such")
        values = self._read_tensor("float32", (request.rows, table.spec.width))
        put = RowsPut(table=request.table, key=request.key, start=request.start, steps=request.steps)
        container.put_rows(put, values)

    def _pull(self, request: requests.Pull) -> Answer:
        container = self._server.container(request.container)
        if (waiting := _await_step(container, request.at_least)) is not None:
            return Answer(waiting)
        step, flat = container.pull(request.replica)
        coding = Coding(container.layout, request.wire)
        room = coding.room()
        # From the last chunk to the first: the front layers lie at the end, and are what a forward needs first.
        parts = (bytes_of(coding.encode(flat, chunk, room)) for chunk in reversed(container.layout.chunks))
        return Answer(replies.Pulled(step=step), parts, coding.bytes)

    def _look(self, request: requests.Look) -> Answer:
        container = self._server.container(request.container)
        if (waiting := _await_step(container, request.at_least)) is not None:
            return Answer(waiting)
        step, flat = container.look(request.known)
        return Answer(replies.Pulled(step=step), [bytes_of(flat)] if flat is not None else ())

    def _apply(self, request: requests.Apply) -> replies.Reply:
        container = self._server.container(request.container)
        if request.measure:
            return replies.SquaredNorm(squared=container.squared_norm(request.close))
        container.apply(request.close, request.options, request.scale)
        if container.journal.due:
            container.journal.renew()
        return replies.Done()

    # ── copies of other servers' shares ──────────────────────────────────────────────────────────────────

    def _of_another_server(self, request: requests.OfAnotherServer) -> Answer:
        backup = self._server.backup
        match request:
            case requests.Keep():
                if len(self._room) < self._length:
                    self._room = bytearray(self._length)  # not every time: fresh memory costs more than reading
                body = memoryview(self._room)[: self._length]
                self._channel.read_body(body)
                reply, settle = backup.take(request, body)
                return Answer(reply, then=settle)
            case requests.KeepWhole():
                tensors = {name: self._read_tensor(dtype, shape) for name, dtype, shape in request.entries}
                self._channel.end_body()
                backup.take_whole(request, tensors)
                return Answer(replies.Done())
            case requests.Fetch():
                found = backup.give(request)
                if found is None:
                    return Answer(replies.Missing())
                tensors, notes, position = found
                kept = replies.Kept(entries=entries_of(tensors.items()), notes=notes, position=position)
                return Answer(kept, [bytes_of(tensor) for tensor in tensors.values()])
            case requests.Forget():
                backup.forget(request)
                return Answer(replies.Done())

    # ── everything ───────────────────────────────────────────────────────────────────────────────────────

    def _books(self, request: requests.ReadBooks) -> replies.BooksRead:
        if request.number is None:
            return replies.BooksRead(books=self._run(request.container).books())
        books = self._server.container(request.container).frozen(request.number).books
        if books is None:
            raise PacelineError(f"this server is not the chief of container {request.container!r}: ask its server 0")
        return replies.BooksRead(books=books)

    def _frozen(self, request: requests.ReadFrozen) -> Answer:
        container = self._server.container(request.container)
        if request.what == "sums":
            sums, touched = container.sums()
            return Answer(replies.Tensors(entries=[(str(slot), "", ()) for slot in touched]), [bytes_of(sums)])
        if request.what == "rows":
            last = _one_of(container.tables, request.table).last
            return _named([("ids", last.ids), ("values", last.values)])
        frozen = container.frozen(request.number)
        if request.what == "parameters":
            return Answer(replies.Tensors(entries=[]), [bytes_of(frozen.parameters)])
        if request.what == "extras":
            return _named(frozen.extras)
        if request.what == "table":
            copy = _one_of(frozen.tables, request.table)
            return _named([("", copy.weight), *copy.state.items()], [("steps", float(copy.steps))])
        state = [(f"{slot}/{key}", value) for slot, held in frozen.state.items() for key, value in held.items()]
        tensors = [(name, value) for name, value in state if isinstance(value, torch.Tensor)]
        return _named(tensors, [(name, float(value)) for name, value in state if not isinstance(value, torch.Tensor)])

    def _restore(self, request: requests.Restore) -> None:
        container, books = self._server.container(request.container), request.books
        check_count("step", request.step)
        runs = self._server.runs(request.container) if books is not None else None
        if books is not None:
            check_books(books)
        flat = self._read_tensor("uint8", (container.layout.bytes,))
        states: States = {slot: {} for slot in request.born}
        for slot, key, dtype, shape in request.entries:
            states.setdefault(slot, {})[key] = self._read_tensor(dtype, shape)
        for slot, key, number in request.numbers:
            states.setdefault(slot, {})[key] = number
        others = [tensor for _, tensor in runs.extras.all] if runs is not None and request.buffers else []
        values = [self._read_tensor(type_name(tensor), tuple(tensor.shape)) for tensor in others]
        self._channel.end_body()
        container.maker.check_states(states)
        if runs is not None and books is not None:
            runs.take_books(self._run(request.container), books, list(zip(others, values, strict=True)))
        container.restore(flat, states, request.step)
        self._server.save(request.container)


def _await_step(container: Container, at_least: int) -> replies.Waiting | None:
    """Wait until so many steps have been made. A server that was started again may have yet to hear of the last one."""
    give_up = time.monotonic() + ANSWER_WITHIN_S
    while container.step < at_least:
        if time.monotonic() > give_up:
            return replies.Waiting(why=f"server {container.server} to make step {at_least - 1}")
        time.sleep(PAUSE_S)
    return None


def _named(tensors: Sequence[tuple[str, torch.Tensor]], numbers: list[tuple[str, float]] | None = None) -> Answer:
    """Answer with tensors and numbers, and their names."""
    reply = replies.Tensors(entries=entries_of(tensors), numbers=numbers or [])
    return Answer(reply, [bytes_of(tensor) for _, tensor in tensors])


def _one_of(things: list[Thing], number: int) -> Thing:
    if not 0 <= number < len(things):
        raise PacelineError(f"table {number} does not exist: there are {len(things)}")
    return things[number]
