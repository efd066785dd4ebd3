"""A server: a process that only owns. Holds its share of any number of containers, and answers requests.

One thread a connection; each reads a request, does it, and replies. A request that is wrong is answered with a
sentence; bytes that are not a request end their connection, and nothing else. Server 0 of a container is its chief.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from paceline import __version__
from paceline.central import protocol as p
from paceline.central.bounds import check_count, check_open, check_place, read_books
from paceline.central.connection import Connection
from paceline.central.container import Coding, Container, States
from paceline.central.journal import Pushed, RowsPut
from paceline.central.recovery import keep, recover
from paceline.central.shards import DTYPES
from paceline.central.steps import ANSWER_WITHIN_S, Steps
from paceline.central.tables import Rows
from paceline.errors import PacelineError
from paceline.exchange.frames import Channel, ConnectionLost, FrameError, tune
from paceline.exchange.secure import LINGER_S, Keys, same_token, wrap_server
from paceline.launch.place import check_container

SMALL_BODY_BYTES = 1 << 28  # buffers, notes
LOOK_EVERY_S = 0.25
HELLO_WITHIN_S = 10.0
PAUSE_S = 0.01
SKIP_WITHIN_S = 60.0  # for the rest of a request that is refused
MOST_STRANGERS = 256  # connections that have not shown the token yet

Body = Iterable[memoryview]
Thing = TypeVar("Thing")


class Server:
    """Answers on a listening socket until it is told to stop."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        token: str,
        keys: Keys | None = None,
        folder: Path | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._listener = listener
        self._token = token
        self._keys = keys
        self._folder = folder  # where logs of containers are kept
        self.say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        self._lock = threading.Lock()  # guards all below
        self._containers: dict[str, Container] = {}
        self._steps: dict[str, Steps] = {}
        self._addresses: dict[str, list[str]] = {}  # of all servers of each container
        self._making = threading.Lock()  # held while a container is made, which may take a while
        self._strangers = 0
        self._ended = threading.Event()

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def run(self) -> None:
        """Serve until `stop`."""
        threading.Thread(target=self._look, name="paceline-look", daemon=True).start()
        while not self._ended.is_set():
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if self._ended.is_set() or error.errno in (errno.EBADF, errno.EINVAL):
                    break
                self.say(f"a connection could not be accepted ({error.strerror})")  # too many files are open, perhaps
                self._ended.wait(LOOK_EVERY_S)
                continue
            if self._strangers >= MOST_STRANGERS:
                connection.close()
                continue
            with self._lock:
                self._strangers += 1
            threading.Thread(target=self._serve, args=(connection, address), daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the containers, after the end."""
        with self._lock:
            names = list(self._containers)
        for name in names:
            with self._lock:
                container, steps = self._containers.pop(name), self._steps.pop(name, None)
            if steps is not None:
                steps.close()
            container.close()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            self._look_once()

    def _look_once(self) -> None:
        """By itself, so that between two looks nothing here holds on to a container that was dropped."""
        with self._lock:
            trainings = list(self._steps.values())
        for steps in trainings:
            steps.look_for_missing()

    # ── one connection ───────────────────────────────────────────────────────────────────────────────────

    def _serve(self, connection: socket.socket, address: tuple[str, int]) -> None:
        visitor: _Visitor | None = None
        known = False
        try:
            tune(connection)
            connection.settimeout(HELLO_WITHIN_S)
            secured = wrap_server(connection, self._keys) if self._keys is not None else connection
            secured.settimeout(None)
            channel: Channel[p.Request] = Channel(secured, p.REQUESTS)
            with contextlib.closing(channel):
                self._welcome(channel, secured)
                known = self._no_stranger()
                visitor = _Visitor(self, channel)
                visitor.serve()
        except ConnectionLost as error:
            if not known:
                self.say(f"a stranger at {address[0]}:{address[1]} has gone: {error}")
        except (PacelineError, OSError) as error:
            self.say(f"closed the connection from {address[0]}:{address[1]}: {error}")
        except Exception:
            self.say(f"closed the connection from {address[0]}:{address[1]}:\n{traceback.format_exc()}")
        finally:
            connection.close()
            if not known:
                self._no_stranger()
            if visitor is not None:
                visitor.gone()

    def _no_stranger(self) -> bool:
        with self._lock:
            self._strangers -= 1
        return True

    def _welcome(self, channel: Channel[p.Request], connection: socket.socket) -> None:
        """Nobody is listened to before it has shown the token."""
        try:
            hello, _ = channel.receive(HELLO_WITHIN_S)
            channel.end_body()
            if not isinstance(hello, p.Hello):
                raise FrameError("the first message is not a greeting")
        except FrameError as error:
            # In a frame of ours: a client of another version, or one with keys, learns from it what is wrong.
            _send_away(channel, connection, str(error))
            raise
        sentence = None
        # With keys the certificates have told who it is.
        if self._keys is None and not same_token(hello.token, self._token):
            sentence = "the token is not this server's: give the run folder, or the file, it has written it to"
        elif hello.version != __version__:
            sentence = f"this server runs Paceline {__version__} and the client {hello.version}: use the same version"
        if sentence is not None:
            _send_away(channel, connection, sentence)
            raise FrameError(f"refused {hello.who[:40]!r}: {sentence}")
        channel.trusted = True
        channel.send(p.Done())

    # ── containers ───────────────────────────────────────────────────────────────────────────────────────

    def container(self, name: str) -> Container:
        with self._lock:
            if name not in self._containers:
                there = ", ".join(sorted(self._containers)) or "none"
                raise PacelineError(f"container {name!r} does not exist on this server: there is {there}")
            return self._containers[name]

    def steps(self, name: str) -> Steps:
        with self._lock:
            steps = self._steps.get(name)
        if steps is None:
            self.container(name)
            raise PacelineError(f"this server is not the chief of container {name!r}: ask its server 0")
        return steps

    def open(self, request: p.Open) -> Container:
        check_open(request)
        with self._making:
            with self._lock:
                container = self._containers.get(request.container)
            if container is None:
                container = Container(request.container, request.spec, request.server, request.settings)
                keep(container, self._folder)
                self._add(container, request.addresses)
                return container
        if request.spec.servers != container.spec.servers:
            raise PacelineError(
                f"container {request.container!r} is spread over {container.spec.servers} servers and not over "
                f"{request.spec.servers}: give {','.join(self._addresses.get(request.container, []))}, or another name"
            )
        if difference := request.spec.differs_from(container.spec):
            raise PacelineError(
                f"container {request.container!r} holds another model: {difference}; give another name, or the "
                "same model and optimizer"
            )
        if request.server != container.server:
            raise PacelineError(
                f"this is server {container.server} of container {request.container!r} and not {request.server}: give "
                "the addresses in the order in which the container was made"
            )
        if request.settings.run != container.settings.run:
            if request.server == 0:
                peers = self._peers(request.addresses, request.settings.timeout_s)
                self.steps(request.container).reopen(request.spec, request.settings, peers)
            else:
                container.reopen(request.spec, request.settings)
            self._addresses[request.container] = container.addresses = request.addresses
            keep(container, self._folder)
            self.save(container)
        return container

    def save(self, container: Container) -> None:
        """What was given from outside is in the container's journal, if it has one, before that is acknowledged."""
        with self._lock:
            steps = self._steps.get(container.name)
        if steps is not None:
            steps.save(wait=True)
        else:
            container.save({}, {}, wait=True)

    def recover(self) -> None:
        """Have again what a process before this one had in its folder."""
        for container, steps in recover(self._folder, self._peers) if self._folder is not None else ():
            with self._lock:
                self._containers[container.name] = container
                self._addresses[container.name] = container.addresses
                if steps is not None:
                    self._steps[container.name] = steps

    def _add(self, container: Container, addresses: list[str]) -> None:
        container.addresses = addresses
        with self._lock:
            self._containers[container.name] = container
            self._addresses[container.name] = addresses
            if container.server == 0:
                peers = self._peers(addresses, container.settings.timeout_s)
                self._steps[container.name] = Steps(container, peers)

    def _peers(self, addresses: Sequence[str], timeout_s: float) -> list[Connection]:
        return [
            Connection(
                address,
                token=self._token,
                keys=self._keys,
                who="the chief",
                name=f"server {number}",
                timeout_s=timeout_s,
            )
            for number, address in enumerate(addresses)
            if number
        ]

    def drop(self, name: str, *, force: bool) -> None:
        container = self.container(name)
        with self._lock:
            steps = self._steps.get(name)
        if steps is not None and not force and steps.members:
            raise PacelineError(
                f"container {name!r} is being trained, replicas {', '.join(map(str, steps.members))}: end that run "
                "first, or give --force"
            )
        with self._lock:
            self._containers.pop(name, None)
            self._addresses.pop(name, None)
            self._steps.pop(name, None)
        if steps is not None:
            steps.close()
        container.close()
        if container.journal is not None:
            container.journal.remove()

    def copy(self, request: p.Copy) -> None:
        """Another container out of one: all of it if this is the chief, else this server's share."""
        check_container(request.to)
        with self._lock:
            if request.to in self._containers:
                raise PacelineError(f"container {request.to!r} is there already: give another name, or drop it first")
        if request.number:
            self._take_over(request, request.number)
            return
        steps = self.steps(request.container)

        def drop() -> p.Done:
            with contextlib.suppress(PacelineError):
                self.drop(request.to, force=True)
            return p.Done()

        steps.copy(request.to, lambda number: self._take_over(request, number), drop)

    def _take_over(self, request: p.Copy, number: int) -> p.Done:
        origin = self.container(request.container)
        frozen = origin.frozen(number)
        with self._making:
            settings = msgspec.structs.replace(origin.settings, run=f"copy of {request.container}")
            container = Container(request.to, origin.spec, origin.server, settings)
            container.take_over(frozen)
            keep(container, self._folder)
            with self._lock:
                addresses, steps = self._addresses[request.container], self._steps.get(request.container)
            self._add(container, addresses)
        if steps is not None:
            count = len(steps.buffers.tensors)
            copy = self.steps(request.to)
            extras = [(name, tensor.clone()) for name, tensor in frozen.extras]
            copy.describe(extras[:count], extras[count:], steps.keys)
            copy.load_notes(json.loads(frozen.books))
            copy.abandon()
        self.save(container)
        return p.Done()

    def description(self, name: str) -> p.Described:
        container = self.container(name)
        with self._lock:
            addresses, steps = self._addresses.get(name, []), self._steps.get(name)
        described = p.Described(spec=container.spec, server=container.server, step=container.step, addresses=addresses)
        if steps is None:
            return described
        return msgspec.structs.replace(
            described,
            members=steps.members,
            rule=steps.chief.rule,
            accepting=steps.chief.accepting,
            keys=steps.keys,
            buffers=_entries(steps.buffers.tensors),
            frozen=_entries(steps.frozen),
        )

    def listing(self) -> list[p.Listing]:
        with self._lock:
            containers, trainings = list(self._containers.values()), dict(self._steps)
        found = []
        for container in containers:
            steps = trainings.get(container.name)
            found.append(
                p.Listing(
                    name=container.name,
                    step=container.step,
                    bytes=container.bytes + sum(table.weight.nbytes for table in container.tables),
                    tensors=len(container.spec.tensors) + len(container.spec.tables),
                    optimizer=container.spec.optimizer.name,
                    replicas=len(steps.members) if steps is not None else 0,
                    rule=type(steps.chief.rule).__name__.lower() if steps is not None else "",
                    loss=steps.chief.last.loss if steps is not None else 0.0,
                )
            )
        return found


def _send_away(channel: Channel[p.Request], connection: socket.socket, sentence: str) -> None:
    """Tell a stranger why, and let it read that: with bytes unread here the close that follows would be a reset."""
    give_up = time.monotonic() + LINGER_S
    with contextlib.suppress(PacelineError, OSError):
        channel.send(p.Refused(sentence=sentence), timeout_s=LINGER_S)
        socket.socket.shutdown(connection, socket.SHUT_WR)
        while (left := give_up - time.monotonic()) > 0:
            socket.socket.settimeout(connection, left)
            if not socket.socket.recv(connection, 4096):
                break


@dataclass(frozen=True)
class Answer:
    """A reply and its body. With `body_bytes` the body is made while it is sent."""

    reply: p.Reply
    body: Body = ()
    body_bytes: int | None = None


class _Visitor:
    """One connection that has shown the token."""

    def __init__(self, server: Server, channel: Channel[p.Request]) -> None:
        self._server = server
        self._channel = channel
        self._joined: tuple[Steps, int, int] | None = None
        self._same_machine = False
        self._length = 0  # of the body of the request in hand

    def gone(self) -> None:
        if self._joined is not None:
            steps, replica, incarnation = self._joined
            # On one machine nothing but the end of a process ends a connection.
            steps.lost(replica, incarnation, at_once=self._same_machine)

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

    def _refuse(self, sentence: str) -> Answer:
        self._channel.skip_body(SKIP_WITHIN_S)
        return Answer(p.Refused(sentence=sentence))

    def _answer(self, request: p.Request) -> Answer:
        server = self._server
        match request:
            case p.Ask():
                reply = server.steps(request.container).ask(request)
                waiting = isinstance(reply, p.Waiting)
                return Answer(reply, () if waiting else server.steps(request.container).buffers_now())
            case p.Report():
                buffers = self._channel.read_whole_body(SMALL_BODY_BYTES)
                return Answer(server.steps(request.container).report(request, bytes(buffers)))
            case p.Push():
                self._push(request)
                return Answer(p.Done())
            case p.Pull():
                return self._pull(request)
            case p.PullRows():
                return self._pull_rows(request)
            case p.PutRows():
                self._put_rows(request)
                return Answer(p.Done())
            case p.Open():
                return Answer(self._open(request))
            case p.Fill():
                self._fill(request)
                return Answer(p.Done())
            case p.Task():
                return Answer(server.steps(request.container).task(request))
            case p.TaskDone():
                return Answer(server.steps(request.container).task_done(request))
            case p.Apply():
                return Answer(self._apply(request))
            case p.Leave():
                server.steps(request.container).leave(request.replica, request.incarnation)
                return Answer(p.Done())
            case p.Stop():
                server.steps(request.container).stop()
                return Answer(p.Done())
            case p.SetRule():
                server.steps(request.container).set_rule(request.rule)
                return Answer(p.Done())
            case p.Buffers():
                steps = server.steps(request.container)
                tensors = steps.frozen if request.frozen else steps.buffers.tensors
                return Answer(p.Tensors(entries=_entries(tensors)), [bytes_of(tensor) for _, tensor in tensors])
            case p.Describe():
                return Answer(server.description(request.container))
            case p.Freeze():
                if request.number:
                    step = server.container(request.container).freeze(request.number).step
                    return Answer(p.Copied(number=request.number, step=step))
                return Answer(server.steps(request.container).freeze())
            case p.Frozen():
                return self._frozen(request)
            case p.Thaw():
                server.container(request.container).thaw(request.number)
                return Answer(p.Done())
            case p.Restore():
                self._restore(request)
                return Answer(p.Done())
            case p.Notes():
                notes = json.dumps(server.steps(request.container).notes()).encode()
                return Answer(p.Tensors(entries=[("notes", "json", (len(notes),))]), [memoryview(notes)])
            case p.Containers():
                return Answer(p.Listed(containers=server.listing()))
            case p.Drop():
                server.drop(request.container, force=request.force)
                return Answer(p.Done())
            case p.Copy():
                server.copy(request)
                return Answer(p.Done())
            case _:
                raise PacelineError(f"{type(request).__name__} is not understood here")

    # ── opening and filling ──────────────────────────────────────────────────────────────────────────────

    def _open(self, request: p.Open) -> p.Opened:
        container = self._server.open(request)
        container.admit(request.replica, request.incarnation)
        if request.server == 0:
            steps = self._server.steps(request.container)
            steps.compare(request.replica, request.checks)
            steps.join(request.replica, request.incarnation)
            if self._joined is not None:
                self.gone()
            self._joined = (steps, request.replica, request.incarnation)
        self._same_machine = shared = request.machine == machine_identity()
        descriptor = container.arena.arena.descriptor
        return p.Opened(
            step=container.step,
            filled=container.filled,
            reopened=container.reopened,
            arena=(os.getpid(), descriptor) if shared else None,
            tables=[(os.getpid(), table.arena.descriptor) for table in container.tables] if shared else [],
        )

    def _fill(self, request: p.Fill) -> None:
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
            self._server.steps(request.container).describe(buffers, frozen, request.keys)
        with container.lock:
            container.arena.parameters.copy_(flat)
            container.fill()
        self._server.save(container)

    def _read_tensor(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        kind = DTYPES.get(dtype) or _OTHER_TYPES.get(dtype)
        if kind is None:
            raise PacelineError(f"{dtype!r} is not a type of tensors that can be sent")
        if not (min(shape, default=0) >= 0 and math.prod(shape) * kind.itemsize <= self._length):
            raise PacelineError(f"a tensor of shape {shape} is not in a body of {self._length} bytes")
        tensor = torch.empty(shape, dtype=kind)
        self._channel.read_body(bytes_of(tensor))
        return tensor

    # ── gradients and parameters ─────────────────────────────────────────────────────────────────────────

    def _push(self, request: p.Push) -> None:
        container = self._server.container(request.container)
        check_place(request.replica, container.settings.replicas)
        if not request.shared:
            flat = container.arena.gradients[request.replica]
            coding = Coding(container.layout, request.wire)
            room = torch.empty(0 if coding.exact else coding.most, dtype=torch.uint8)
            for chunk in container.layout.chunks:
                if coding.exact or chunk.dtype != torch.float32:
                    self._channel.read_body(bytes_of(flat[chunk.start : chunk.stop]))
                else:
                    coded = room[: coding.bytes_of(chunk)]
                    self._channel.read_body(bytes_of(coded))
                    coding.decode(coded, flat, chunk)
        untouched = request.untouched
        if request.marks:
            marks = self._read_tensor("uint8", (len(container.layout.slots),))
            untouched = [slot for slot, touched in enumerate(marks.tolist()) if not touched]
        rows = self._read_rows(container, request.rows) if request.rows else []
        pushed = Pushed(
            replica=request.replica,
            incarnation=request.incarnation,
            ticket=request.ticket,
            untouched=untouched,
            rows=request.rows,
        )
        container.push(pushed, rows, shared=request.shared)

    def _read_rows(self, container: Container, counts: list[int]) -> list[Rows]:
        if len(counts) != len(container.tables):
            raise PacelineError(f"rows of {len(counts)} tables do not fit {len(container.tables)}")
        found = []
        for table, count in zip(container.tables, counts, strict=True):
            ids = self._read_tensor("int64", (count,))
            found.append(Rows(ids, self._read_tensor("float32", (count, table.spec.width))))
        return found

    def _pull_rows(self, request: p.PullRows) -> Answer:
        container = self._server.container(request.container)
        table = _one_of(container.tables, request.table)
        ids = self._read_tensor("int64", (self._length // 8,))
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < table.rows):
            raise PacelineError(f"a row of {table.spec.name} does not exist: this server has {table.rows}")
        with container.lock:
            values = table.weight[ids]
        return Answer(p.Tensors(entries=[]), [bytes_of(values)])

    def _put_rows(self, request: p.PutRows) -> None:
        container = self._server.container(request.container)
        table = _one_of(container.tables, request.table)
        if not (request.start >= 0 and request.rows >= 0 and request.start + request.rows <= table.rows):
            raise PacelineError(f"rows {request.start} to {request.start + request.rows} of {table.spec.name}: no such")
        values = self._read_tensor("float32", (request.rows, table.spec.width))
        put = RowsPut(table=request.table, key=request.key, start=request.start, steps=request.steps)
        container.put_rows(put, values)

    def _pull(self, request: p.Pull) -> Answer:
        container = self._server.container(request.container)
        give_up = time.monotonic() + ANSWER_WITHIN_S
        while container.step < request.at_least:  # it was started again, and has yet to hear of the last step
            if time.monotonic() > give_up:
                return Answer(p.Waiting(why=f"server {container.server} to make step {request.at_least - 1}"))
            time.sleep(PAUSE_S)
        step, flat = container.pull(request.replica)
        coding = Coding(container.layout, request.wire)
        room = torch.empty(0 if coding.exact else coding.most, dtype=torch.uint8)
        # From the last chunk to the first: the front layers lie at the end, and are what a forward needs first.
        parts = (bytes_of(coding.encode(flat, chunk, room)) for chunk in reversed(container.layout.chunks))
        return Answer(p.Pulled(step=step), parts, coding.bytes)

    def _apply(self, request: p.Apply) -> p.Reply:
        container = self._server.container(request.container)
        if request.measure:
            return p.Measured(squared=container.squared_norm(request.close))
        container.apply(request.close, request.options, request.scale)
        if container.journal is not None and container.journal.due:
            container.save({}, {}, wait=False)
        return p.Done()

    # ── everything ───────────────────────────────────────────────────────────────────────────────────────

    def _frozen(self, request: p.Frozen) -> Answer:
        container = self._server.container(request.container)
        if request.what == "sums":
            sums, touched = container.sums()
            return Answer(p.Tensors(entries=[(str(slot), "", ()) for slot in touched]), [bytes_of(sums)])
        if request.what.startswith("rows "):
            number = request.what.removeprefix("rows ")
            last = _one_of(container.tables, int(number) if number.isdigit() else -1).last
            held = {"ids": last.ids, "values": last.values}
            entries = [(key, type_name(value), tuple(value.shape)) for key, value in held.items()]
            return Answer(p.Tensors(entries=entries), [bytes_of(value) for value in held.values()])
        frozen = container.frozen(request.number)
        if request.what == "extras":
            return Answer(p.Tensors(entries=_entries(frozen.extras)), [bytes_of(tensor) for _, tensor in frozen.extras])
        if request.what == "books":
            return Answer(p.Tensors(entries=[("books", "json", (len(frozen.books),))]), [memoryview(frozen.books)])
        if request.what.startswith("table "):
            number = request.what.removeprefix("table ")
            copy = _one_of(frozen.tables, int(number) if number.isdigit() else -1)
            held = {"": copy.weight, **copy.state}
            entries = [(key, type_name(value), tuple(value.shape)) for key, value in held.items()]
            numbers = [("steps", float(copy.steps))]
            return Answer(p.Tensors(entries=entries, numbers=numbers), [bytes_of(value) for value in held.values()])
        if request.what == "parameters":
            return Answer(p.Tensors(entries=[]), [bytes_of(frozen.parameters)])
        if request.what != "state":
            raise PacelineError(f"a copy has parameters, state, extras and books, and not {request.what[:40]!r}")
        entries, numbers, body = [], [], []
        for slot, state in frozen.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    entries.append((f"{slot}/{key}", type_name(value), tuple(value.shape)))
                    body.append(bytes_of(value))
                else:
                    numbers.append((f"{slot}/{key}", float(value)))
        return Answer(p.Tensors(entries=entries, numbers=numbers), body)

    def _restore(self, request: p.Restore) -> None:
        container = self._server.container(request.container)
        check_count("step", request.step)
        steps = self._server.steps(request.container) if request.chief else None
        books = read_books(request.chief) if request.chief else {}
        flat = self._read_tensor("uint8", (container.layout.bytes,))
        states: States = {slot: {} for slot in request.born}
        for slot, key, dtype, shape in request.entries:
            states.setdefault(slot, {})[key] = self._read_tensor(dtype, shape)
        for slot, key, number in request.numbers:
            states.setdefault(slot, {})[key] = number
        others = [tensor for _, tensor in [*steps.buffers.tensors, *steps.frozen]] if steps and request.buffers else []
        values = [self._read_tensor(type_name(tensor), tuple(tensor.shape)) for tensor in others]
        self._channel.end_body()
        container.check_states(states)
        if steps is not None:
            steps.load_notes(books, list(zip(others, values, strict=True)))
        with container.lock:
            container.arena.parameters.copy_(flat)
            container.restore_state(states)
            container.fill(request.step)
        self._server.save(container)


_OTHER_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}


def _entries(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, type_name(tensor), tuple(tensor.shape)) for name, tensor in tensors]


def type_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def machine_identity() -> str:
    """The same for two processes that can share memory: one kernel, and (emulated hosts differ in it) one network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}"


def _one_of(things: list[Thing], number: int) -> Thing:
    if not 0 <= number < len(things):
        raise PacelineError(f"table {number} does not exist: there are {len(things)}")
    return things[number]
