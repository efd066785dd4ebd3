"""A server: a process that only owns. Holds its share of any number of containers, and answers requests.

One thread a connection; each reads a request, does it, and replies. A request that is wrong is answered with a
sentence; bytes that are not a request end their connection, and nothing else. Server 0 of a container is its chief.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from paceline import __version__
from paceline.central import protocol as p
from paceline.central.connection import Connection
from paceline.central.container import Coding, Container, States
from paceline.central.shards import DTYPES
from paceline.central.steps import Steps
from paceline.central.tables import Rows
from paceline.errors import PacelineError
from paceline.exchange.frames import Channel, ConnectionLost, FrameError, tune
from paceline.exchange.secure import Keys, same_token, wrap_server

SMALL_BODY_BYTES = 1 << 28  # buffers, notes
LOOK_EVERY_S = 0.25
HELLO_WITHIN_S = 10.0
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
            except OSError:
                break
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

    def _look(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
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
            channel: Channel[p.Request] = Channel(secured, p.Request)
            with contextlib.closing(channel):
                self._welcome(channel)
                known = self._no_stranger()
                visitor = _Visitor(self, channel)
                visitor.serve()
        except ConnectionLost:
            pass
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

    def _welcome(self, channel: Channel[p.Request]) -> None:
        """Nobody is listened to before it has shown the token."""
        hello, _ = channel.receive(HELLO_WITHIN_S)
        channel.end_body()
        sentence = None
        if not isinstance(hello, p.Hello):
            raise FrameError("the first message is not a greeting")
        if not same_token(hello.token, self._token):
            sentence = "the token is not this server's: give the run folder, or the file, it has written it to"
        elif hello.version != __version__:
            sentence = f"this server runs Paceline {__version__} and the client {hello.version}: use the same version"
        if sentence is not None:
            channel.send(p.Refused(sentence=sentence))
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
        with self._lock:
            container = self._containers.get(request.container)
            if container is None:
                container = Container(request.container, request.spec, request.server, request.settings)
                self._containers[request.container] = container
                if request.server == 0:
                    self._steps[request.container] = Steps(container, self._peers(request))
            elif difference := request.spec.differs_from(container.spec):
                raise PacelineError(
                    f"container {request.container!r} holds another model: {difference}; give another name, or the "
                    "same model and optimizer"
                )
            return container

    def _peers(self, request: p.Open) -> list[Connection]:
        return [
            Connection(
                address,
                token=self._token,
                keys=self._keys,
                who="the chief",
                name=f"server {number}",
                timeout_s=request.settings.timeout_s,
            )
            for number, address in enumerate(request.addresses)
            if number
        ]

    def drop(self, name: str) -> None:
        self.container(name)
        with self._lock:
            del self._containers[name]
            steps = self._steps.pop(name, None)
        if steps is not None:
            steps.close()

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
                    bytes=container.bytes,
                    tensors=len(container.spec.tensors),
                    optimizer=container.spec.optimizer.name,
                    replicas=len(steps.chief.members) if steps is not None else 0,
                    rule=type(steps.chief.rule).__name__.lower() if steps is not None else "",
                    loss=steps.chief.last.loss if steps is not None else 0.0,
                )
            )
        return found


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
                return Answer(reply, () if waiting else server.steps(request.container).buffers.packed())
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
                buffers_of = server.steps(request.container).buffers
                entries = [(name, type_name(tensor), tuple(tensor.shape)) for name, tensor in buffers_of.tensors]
                return Answer(p.Tensors(entries=entries), buffers_of.packed())
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
                server.drop(request.container)
                return Answer(p.Done())
            case _:
                raise PacelineError(f"{type(request).__name__} is not understood here")

    # ── opening and filling ──────────────────────────────────────────────────────────────────────────────

    def _open(self, request: p.Open) -> p.Opened:
        container = self._server.open(request)
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
            arena=(os.getpid(), descriptor) if shared else None,
            tables=[(os.getpid(), table.arena.descriptor) for table in container.tables] if shared else [],
        )

    def _fill(self, request: p.Fill) -> None:
        container = self._server.container(request.container)
        self._channel.read_body(bytes_of(container.arena.parameters))
        buffers, frozen = (
            [(name, self._read_tensor(dtype, shape)) for name, dtype, shape in described]
            for described in (request.buffers, request.frozen)
        )
        if container.server == 0:
            self._server.steps(request.container).describe(buffers, frozen)
        container.fill()

    def _read_tensor(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        kind = DTYPES.get(dtype) or _OTHER_TYPES.get(dtype)
        if kind is None:
            raise FrameError(f"{dtype!r} is not a type of tensors that can be sent")
        elements = 1
        for extent in shape:
            elements *= extent
        if not 0 <= elements * kind.itemsize <= self._length:
            raise FrameError(f"a tensor of shape {shape} is not in the body")
        tensor = torch.empty(shape, dtype=kind)
        self._channel.read_body(bytes_of(tensor))
        return tensor

    # ── gradients and parameters ─────────────────────────────────────────────────────────────────────────

    def _push(self, request: p.Push) -> None:
        container = self._server.container(request.container)
        if not 0 <= request.replica < container.settings.replicas:
            raise PacelineError(f"replica is {request.replica}: there are places for {container.settings.replicas}")
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
        rows = self._read_rows(container, request.rows) if request.rows else []
        container.stage(request.replica, request.ticket, request.untouched)
        if rows:
            container.stage_rows(request.replica, rows)

    def _read_rows(self, container: Container, counts: list[int]) -> list[Rows]:
        if len(counts) != len(container.tables):
            raise FrameError(f"rows of {len(counts)} tables do not fit {len(container.tables)}")
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
        with container.lock:
            if request.rows:
                table.put(request.key, request.start, values)
            if request.steps is not None:
                table.steps = request.steps

    def _pull(self, request: p.Pull) -> Answer:
        container = self._server.container(request.container)
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
        return p.Done()

    # ── everything ───────────────────────────────────────────────────────────────────────────────────────

    def _frozen(self, request: p.Frozen) -> Answer:
        container = self._server.container(request.container)
        if request.what == "sums":
            sums, touched = container.sums()
            return Answer(p.Tensors(entries=[(str(slot), "", ()) for slot in touched]), [bytes_of(sums)])
        frozen = container.frozen(request.number)
        if request.what.startswith("table "):
            number = request.what.removeprefix("table ")
            copy = _one_of(frozen.tables, int(number) if number.isdigit() else -1)
            held = {"": copy.weight, **copy.state}
            entries = [(key, type_name(value), tuple(value.shape)) for key, value in held.items()]
            numbers = [("steps", float(copy.steps))]
            return Answer(p.Tensors(entries=entries, numbers=numbers), [bytes_of(value) for value in held.values()])
        if request.what == "parameters":
            return Answer(p.Tensors(entries=[]), [bytes_of(frozen.parameters)])
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
        with container.lock:
            self._channel.read_body(bytes_of(container.arena.parameters))
            states: States = {slot: {} for slot in request.born}
            for slot, key, dtype, shape in request.entries:
                states.setdefault(slot, {})[key] = self._read_tensor(dtype, shape)
            for slot, key, number in request.numbers:
                states.setdefault(slot, {})[key] = number
            container.restore_state(states)
            if request.chief:
                self._server.steps(request.container).load_notes(json.loads(request.chief))
            container.fill(request.step)


_OTHER_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
}


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
