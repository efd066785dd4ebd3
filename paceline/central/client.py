"""A replica's side of the servers: takes work, pulls parameters, leaves gradients.

For each server there is a *side*: the connection, and the memory in which that server's share is seen. On the same host
that is the server's own memory: gradients are written where the server adds them up, and in a sync run the model's
parameters simply *are* the server's. Elsewhere it is memory of this process, filled and emptied over TCP.

Most parameters lie in one piece on one server, and the model points there. One that is cut between servers has memory
of its own, into which every pull copies its pieces.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.central import protocol as p
from paceline.central.chief import Close
from paceline.central.connection import FIRST_CONTACT_S, Connection
from paceline.central.container import Coding
from paceline.central.embedding import Lookup, find_tables
from paceline.central.jobs import Job, together
from paceline.central.landing import Landing
from paceline.central.server import bytes_of, machine_identity, type_name
from paceline.central.shards import Part, Shards, describe, plain_options
from paceline.central.tables import Dealt, Rows, TableSpec, table_view
from paceline.errors import ArenaError, ModelError, Stalled
from paceline.exchange.frames import Channel, ConnectionLost
from paceline.exchange.secure import Keys
from paceline.exchange.wire import Feedback, wire
from paceline.memory import Arena, Layout
from paceline.memory.server_arena import ServerArena
from paceline.owners.gradients import Destination, GradientCollector, Whole
from paceline.owners.models import grouped_parameters, own_state

# How parameters travel when gradients are coded so: coarser than 16 bits would be a different model.
PARAMETER_WIRE = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "int8": "fp16"}


PAUSE_S = 0.01  # between two looks at a server's memory
ROWS_AT_ONCE = 1 << 18  # of a table, in one request


@dataclass(frozen=True)
class Servers:
    """Where the servers of a container are, and how to be let in."""

    addresses: Sequence[str]
    container: str
    token: str = ""
    keys: Keys | None = None


@dataclass
class _Side:
    """One server, as this replica sees it."""

    connection: Connection
    layout: Layout
    opened: p.Opened | None = None
    arena: ServerArena | None = None  # the server's own memory, if it can be shared
    parameters: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    gradients: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    feedback: dict[int, Feedback] = field(default_factory=dict)  # by chunk, of a lossy wire
    tables: list[torch.Tensor] = field(default_factory=list)  # its rows of each, if memory can be shared


class Client:
    """One replica of one container."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        servers: Servers,
        settings: p.Settings,
        *,
        replica: int,
        incarnation: int,
        wire_name: str = "fp32",
        share_memory: bool = True,
        only_tables: bool = False,
    ) -> None:
        """`only_tables`: everything but sparse embeddings stays with the replica."""
        self.model = model
        self.optimizer = self.options_from = optimizer
        self.replica, self.incarnation = replica, incarnation
        self.container = servers.container
        self._settings = settings
        self._servers = servers
        self._wire = wire_name
        self._share_memory = share_memory
        self.tables = find_tables(model)
        listed = grouped_parameters(model, optimizer)
        groups = {name: group for name, _, group in listed}
        sparse = {lookup.name for lookup in self.tables}
        named = [entry for entry in listed if entry[0] not in sparse and not only_tables]
        self.spec = describe(
            named,
            optimizer,
            len(servers.addresses),
            [_table_spec(lookup, groups[lookup.name]) for lookup in self.tables],
        )
        self.shards = Shards(self.spec)
        self._parameters = {name: parameter for name, parameter, group in named if group is not None}
        self._frozen = [(name, parameter) for name, parameter, group in named if group is None]
        self._buffers = [] if only_tables else list(own_state(model).named_buffers())
        self._checks = [zlib.crc32(bytes_of(self._parameters[name])) for name in self.shards.names]
        self._sides = [self._side(number) for number in range(len(servers.addresses))]
        for number, side in enumerate(self._sides):
            side.connection.introduce = self._introducer(number)
        self.chief = replica == 0
        self.step = 0  # closed so far, as far as this replica knows
        self._pulled = -1  # the version of the parameters it has
        self._elsewhere = False  # a server was started again, and has other memory than the model points at
        self._moving = threading.Lock()
        self._ready = False
        self._live: bool | None = None  # whether the model points at the servers' own memory
        self._cut: list[tuple[torch.Tensor, list[Part]]] = []  # parameters in several places, and where those are
        try:
            self._open()
        except BaseException:
            for side in self._sides:
                side.connection.close()
            raise
        self._landing = Landing(self.shards)
        self._marks = [torch.ones(len(side.layout.slots), dtype=torch.uint8) for side in self._sides]
        self._ticket: int | None = None  # the one that is being computed
        self._early: dict[int, Job] = {}  # by server: gradients that are being sent while backward runs
        self.collector = GradientCollector(
            [self._parameters[name] for name in self.shards.names],
            [self._destination(name) for name in self.shards.names],
            self._landed,
        )
        self._ready = True

    @property
    def pulled(self) -> int:
        """The version of the parameters that the model points at; -1: it has to pull first."""
        return -1 if self._elsewhere else self._pulled

    # ── opening ──────────────────────────────────────────────────────────────────────────────────────────

    def _side(self, number: int) -> _Side:
        connection = Connection(
            self._servers.addresses[number],
            token=self._servers.token,
            keys=self._servers.keys,
            who=f"replica {self.replica}",
            name=f"server {number}",
            timeout_s=self._settings.timeout_s,
            first_contact_s=FIRST_CONTACT_S,
        )
        return _Side(connection, self.shards.layouts[number])

    def _introducer(self, number: int) -> Callable[[], None]:
        side = self._sides[number]
        request = p.Open(
            container=self.container,
            spec=self.spec,
            settings=self._settings,
            addresses=list(self._servers.addresses),
            server=number,
            replica=self.replica,
            incarnation=self.incarnation,
            machine=machine_identity() if self._share_memory else "apart",
            checks=self._checks if number == 0 else [],
        )

        def introduce() -> None:
            again = side.opened is not None
            side.opened = side.connection.call(request, p.Opened)
            if again:
                self._moved(side, number)

        return introduce

    def _open(self) -> None:
        for side in self._sides:
            side.connection.call(p.Containers(), p.Listed)  # connects, and is introduced
            assert side.opened is not None
            if side.opened.arena is not None:
                side.arena = self._attach(side)
                side.gradients = side.arena.gradients[self.replica]
            else:
                side.parameters = torch.zeros(side.layout.bytes, dtype=torch.uint8)
                side.gradients = torch.zeros(side.layout.bytes, dtype=torch.uint8)
                coding = wire(self._wire)
                if coding.lossy:
                    side.feedback = {
                        number: Feedback(chunk.bytes // 4, coding)
                        for number, chunk in enumerate(side.layout.chunks)
                        if chunk.dtype == torch.float32
                    }
        first = self._sides[0].opened
        assert first is not None
        filled = all(side.opened is not None and side.opened.filled for side in self._sides)
        # Before the first step somebody may still be giving the servers tables, or state.
        if not filled or (first.step == 0 and not first.reopened):
            self.once(p.FILL, self._fill)
        self.step = first.step
        if first.reopened:
            self._take_what_is_not_trained()
        self._attach_tables()
        for lookup in self.tables:
            lookup.connect(self._fetch)

    def _attach(self, side: _Side) -> ServerArena:
        while True:
            opened = side.opened
            assert opened is not None
            assert opened.arena is not None
            try:
                return ServerArena(Arena.attach(*opened.arena), side.layout, self._settings.replicas)
            except ArenaError:
                side.connection.call(p.Containers(), p.Listed)
                if side.opened is opened:
                    raise  # it is there, and was when it said so

    def _attach_tables(self) -> None:
        for number, side in enumerate(self._sides):
            self._attach_tables_of(side, number)

    def _attach_tables_of(self, side: _Side, number: int) -> None:
        assert side.opened is not None
        side.tables = [
            table_view(Arena.attach(*held), _rows_on(lookup, number, len(self._sides)), lookup.width)
            for lookup, held in zip(self.tables, side.opened.tables, strict=False)
        ]

    def _pull_rows(self, side: _Side, table: int, ids: torch.Tensor, received: torch.Tensor) -> None:
        request = p.PullRows(container=self.container, table=table)
        side.connection.call(request, p.Tensors, body=lambda: [bytes_of(ids)], read=_into(received))

    def _fetch(self, table: int, rows: torch.Tensor) -> torch.Tensor:
        """The values of some rows: from the servers' memory, or over TCP."""
        if len(self._sides) == 1 and self._sides[0].tables:
            return self._sides[0].tables[table].index_select(0, rows)
        dealt = Dealt.out(rows, len(self._sides))
        values = torch.empty(len(rows), self.tables[table].width)
        for side, ids, places in zip(self._sides, dealt.ids, dealt.places, strict=True):
            if side.tables:
                values.index_copy_(0, places, side.tables[table].index_select(0, ids))
            elif len(ids):
                received = torch.empty(len(ids), self.tables[table].width)
                self._pull_rows(side, table, ids, received)
                values[places] = received
        return values

    def _moved(self, side: _Side, number: int) -> None:
        """The server was started again: its memory is another one. What this replica has in it goes there too."""
        assert side.opened is not None
        old = side.arena
        if old is None or side.opened.arena is None:
            return
        with self._moving:
            try:
                new = ServerArena(Arena.attach(*side.opened.arena), side.layout, self._settings.replicas)
                if side.tables:
                    self._attach_tables_of(side, number)
            except ArenaError as error:
                raise ConnectionLost("it has died again") from error
            new.gradients[self.replica].copy_(side.gradients)
            if self._live is False:
                new.pulled[self.replica].copy_(old.pulled[self.replica])
            side.arena, side.gradients = new, new.gradients[self.replica]
            if self._ready:
                self.collector.redirect([self._destination(name) for name in self.shards.names])
            old.arena.close()
            self._live, self._elsewhere = None, True

    def _fill(self) -> None:
        """Give the servers this replica's values: it has come first."""
        buffers = [(name, type_name(tensor), tuple(tensor.shape)) for name, tensor in self._buffers]
        frozen = [(name, type_name(tensor), tuple(tensor.shape)) for name, tensor in self._frozen]
        for number, side in enumerate(self._sides):
            flat = torch.zeros(side.layout.bytes, dtype=torch.uint8)
            for name in self.shards.names:
                values = self._parameters[name].detach().reshape(-1)
                for part in self.shards.parts[name]:
                    if part.server == number:
                        _slot(flat, side.layout, part.slot).copy_(values[part.start : part.stop])
            extras = [*self._buffers, *self._frozen] if number == 0 else []
            body = [bytes_of(flat), *(bytes_of(tensor) for _, tensor in extras)]
            request = p.Fill(
                container=self.container,
                buffers=buffers if number == 0 else [],
                frozen=frozen if number == 0 else [],
                keys=self._keys() if number == 0 else [],
            )
            side.connection.call(request, p.Done, body=lambda body=body: body)  # type: ignore[misc]
        self._fill_state()
        for lookup in self.tables:
            if not lookup.module.weight.is_meta:
                self.put_table(lookup.number, "", lookup.module.weight.detach())

    def _keys(self) -> list[tuple[str, str]]:
        """The keys of the model's state_dict, and which tensor each is: a tied one has several."""
        own = own_state(self.model)
        names = {id(tensor): name for name, tensor in (*own.named_buffers(), *own.named_parameters())}
        held = own.state_dict(keep_vars=True).items()
        return [(key, names[id(value)]) for key, value in held if id(value) in names]

    def _take_what_is_not_trained(self) -> None:
        """The model goes on with what an earlier run has left: also where nothing is trained."""
        for frozen, tensors in ((False, self._buffers), (True, self._frozen)):

            def read(
                channel: Channel[p.Reply], length: int, tensors: Sequence[tuple[str, torch.Tensor]] = tensors
            ) -> None:
                for _, tensor in tensors if length else ():
                    received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
                    channel.read_body(bytes_of(received))
                    tensor.detach().copy_(received)

            self._to_chief.call(p.Buffers(container=self.container, frozen=frozen), p.Tensors, read=read)

    def put_table(self, table: int, key: str, values: torch.Tensor, steps: int | None = None) -> None:
        """Give the servers a value for every row: of the weight (no key), or of the optimizer's state."""
        for number, side in enumerate(self._sides):
            own = values[number :: len(self._sides)]
            for start in range(0, len(own), ROWS_AT_ONCE):
                part = own[start : start + ROWS_AT_ONCE].contiguous()
                request = p.PutRows(
                    container=self.container, table=table, start=start, rows=len(part), key=key, steps=steps
                )
                side.connection.call(request, p.Done, body=lambda part=part: [bytes_of(part)])  # type: ignore[misc]

    def give_table(self, table: int, weight: torch.Tensor, state: dict[str, Any]) -> None:
        """A whole table and its optimizer state, as `read_table` has them."""
        self.put_table(table, "", weight, int(state.get("step", 0)))
        for key, value in state.items():
            if key != "step":
                self.put_table(table, key, value)

    def read_table(self, copy: int, table: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """A whole table and its optimizer state, of a frozen copy."""
        lookup = self.tables[table]
        found: dict[str, Any] = {}
        for number, side in enumerate(self._sides):
            request = p.Frozen(container=self.container, number=copy, what=f"table {table}")
            for key, value in self._read_entries(side, request).items():
                if isinstance(value, torch.Tensor):
                    whole = found.setdefault(key, torch.empty(lookup.rows, lookup.width))
                    whole[number :: len(self._sides)] = value
                else:
                    found[key] = value
        weight = found.pop("")
        steps = found.pop("steps", 0.0)
        if found or steps:
            found["step"] = torch.tensor(float(steps))
        return weight, found

    def _fill_state(self) -> None:
        """What the user's optimizer holds from the start, as Adagrad does."""
        states = {
            name: dict(self.optimizer.state[parameter])
            for name, parameter in self._parameters.items()
            if self.optimizer.state.get(parameter)
        }
        if states:
            self.restore({name: parameter.detach() for name, parameter in self._parameters.items()}, states, 0, b"")

    # ── where the model points ───────────────────────────────────────────────────────────────────────────

    def _destination(self, name: str) -> Destination:
        parameter = self._parameters[name]
        parts = self.shards.parts[name]
        run = self._run(parts)
        if run is not None:
            side = self._sides[parts[0].server]
            return Whole(_elements(side.gradients, side.layout, parts, parameter))
        return _Pieces(
            [
                (_slot(self._sides[part.server].gradients, self._sides[part.server].layout, part.slot), part)
                for part in parts
            ]
        )

    def _run(self, parts: Sequence[Part]) -> int | None:
        """The one server on which all parts lie one after another; None if there is none."""
        server = parts[0].server
        slots = self.shards.layouts[server].slots
        for before, after in itertools.pairwise(parts):
            if (
                after.server != server
                or slots[after.slot].offset != slots[before.slot].offset + slots[before.slot].bytes
            ):
                return None
        return server

    def _point(self, *, live: bool) -> None:
        """Have the model use the servers' own memory (live), or this replica's copy."""
        if self._live is live:
            return
        self._live = live
        self._cut = []
        for name, parameter in self._parameters.items():
            parts = self.shards.parts[name]
            server = self._run(parts)
            if server is None:
                if parameter.data_ptr() == 0 or not any(own is parameter.data for own, _ in self._cut):
                    parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)
                self._cut.append((parameter.data.view(-1), list(parts)))
            else:
                side = self._sides[server]
                parameter.data = _elements(self._seen(side, live=live), side.layout, parts, parameter)

    def _seen(self, side: _Side, *, live: bool) -> torch.Tensor:
        if side.arena is None:
            return side.parameters
        return side.arena.parameters if live else side.arena.pulled[self.replica]

    # ── pulling and pushing ──────────────────────────────────────────────────────────────────────────────

    def pull(self, *, sync: bool) -> None:
        """Have the parameters as they are now. In a sync run nobody writes them while somebody computes."""
        versions = []
        for side in self._sides:
            if side.arena is None:
                versions.append(self._pull_over_tcp(side))
            else:
                versions.append(self._pull_shared(side, copy=not sync))
        live = sync and all(side.arena is not None for side in self._sides)
        self._point(live=live)
        for own, parts in self._cut:
            for part in parts:
                side = self._sides[part.server]
                own[part.start : part.stop] = _slot(self._seen(side, live=live), side.layout, part.slot)
        self._pulled, self._elsewhere = min(versions), False

    def _pull_shared(self, side: _Side, *, copy: bool) -> int:
        """The version that lies in the memory of a server, after it was copied to this replica's place.

        If it is not what it should be, the server is asked: when it was started again, its memory is another one.
        """
        give_up = time.monotonic() + self._settings.timeout_s
        while True:
            arena = side.arena
            assert arena is not None
            if (version := arena.version) >= self.step:
                found = arena.copy_parameters(arena.pulled[self.replica]) if copy else version
                if found is not None:
                    return found
            if time.monotonic() > give_up:
                raise Stalled(
                    f"replica {self.replica} waited {self._settings.timeout_s:g} s for {side.connection.name} to "
                    f"make step {self.step}"
                )
            side.connection.call(p.Containers(), p.Listed)
            if side.arena is arena:
                time.sleep(PAUSE_S)

    def _pull_over_tcp(self, side: _Side) -> int:
        coding = Coding(side.layout, PARAMETER_WIRE[self._wire])
        room = torch.empty(0 if coding.exact else coding.most, dtype=torch.uint8)

        def read(channel: Channel[p.Reply], _: int) -> None:
            for chunk in reversed(side.layout.chunks):
                if coding.exact or chunk.dtype != torch.float32:
                    channel.read_body(bytes_of(side.parameters[chunk.start : chunk.stop]))
                else:
                    coded = room[: coding.bytes_of(chunk)]
                    channel.read_body(bytes_of(coded))
                    coding.decode(coded, side.parameters, chunk)

        request = p.Pull(
            container=self.container, replica=self.replica, at_least=self.step, wire=PARAMETER_WIRE[self._wire]
        )
        return int(side.connection.wait(request, p.Pulled, read=read).step)

    def push(self, ticket: int, used: Sequence[bool]) -> None:
        """Leave the gradient that the collector has gathered with all servers."""
        early, self._early = self._early, {}
        untouched: list[list[int]] = [[] for _ in self._sides]
        for name, was_used in zip(self.shards.names, used, strict=True):
            if not was_used:
                for part in self.shards.parts[name]:
                    untouched[part.server].append(part.slot)
        for number, slots in enumerate(untouched):
            self._marks[number].fill_(1)
            self._marks[number][slots] = 0
        self._landing.finish()
        rows = self._take_rows()
        jobs = [
            early[number].result if number in early else partial(self._push_to, side, ticket, slots, own)
            for number, (side, slots, own) in enumerate(zip(self._sides, untouched, rows, strict=True))
        ]
        together(jobs)

    def _landed(self, parameter: int) -> None:
        """A gradient is complete. The first one of a step starts the senders."""
        self._landing.landed(parameter)
        if self._ticket is not None and not self._early and not self.tables:
            for number, side in enumerate(self._sides):
                if side.arena is None:
                    self._early[number] = Job(partial(self._push_early, number, side, self._ticket))

    def _push_early(self, number: int, side: _Side, ticket: int) -> None:
        request = self._push_request(ticket, marks=True)
        coding = Coding(side.layout, self._wire)

        def body() -> Iterator[memoryview]:
            yield from self._coded(side, coding, partial(self._landing.wait, number))
            self._landing.wait_for_all()
            yield bytes_of(self._marks[number])

        total = coding.bytes + len(side.layout.slots)
        side.connection.call(request, p.Done, body=body, body_bytes=total)

    def abandon(self) -> None:
        """The step will not be completed."""
        self._landing.give_up()
        for number, job in self._early.items():
            job.wait()
            self._sides[number].connection.disconnect()  # half of a gradient has been sent
        self._early = {}

    def _push_request(self, ticket: int, **how: Any) -> p.Push:
        return p.Push(
            container=self.container,
            replica=self.replica,
            incarnation=self.incarnation,
            ticket=ticket,
            wire=self._wire,
            **how,
        )

    def _take_rows(self) -> list[list[Rows]]:
        """The gradients of this step's rows, by server and table."""
        found: list[list[Rows]] = [[] for _ in self._sides]
        for lookup in self.tables:
            rows = lookup.take_gradient()
            dealt = Dealt.out(rows.ids, len(self._sides))
            for own, ids, places in zip(found, dealt.ids, dealt.places, strict=True):
                own.append(Rows(ids, rows.values[places]))
        return found

    def _push_to(self, side: _Side, ticket: int, untouched: list[int], rows: list[Rows]) -> None:
        counts = [len(given.ids) for given in rows]
        request = self._push_request(ticket, untouched=untouched, shared=side.arena is not None, rows=counts)
        tail = [view for given in rows for view in (bytes_of(given.ids), bytes_of(given.values))]
        tail_bytes = sum(view.nbytes for view in tail)
        if side.arena is None:
            coding = Coding(side.layout, self._wire)
            side.connection.call(
                request,
                p.Done,
                body=lambda: chain(self._coded(side, coding), tail),
                body_bytes=coding.bytes + tail_bytes,
            )
        elif self._settings.durability != "none" or rows:
            side.connection.call(request, p.Done, body=lambda: tail)
        else:
            touched = side.arena.touched[self.replica]
            touched.fill_(1)
            if untouched:
                touched[untouched] = 0

    def _coded(self, side: _Side, coding: Coding, wait: Callable[[int], None] = lambda _: None) -> Iterator[memoryview]:
        room = torch.empty(0 if coding.exact else coding.most, dtype=torch.uint8)
        for number, chunk in enumerate(side.layout.chunks):
            wait(number)
            feedback = side.feedback.get(number)
            if feedback is not None:
                coded = room[: coding.bytes_of(chunk)]
                feedback.encode(side.gradients[chunk.start : chunk.stop].view(torch.float32), coded)
            else:
                coded = coding.encode(side.gradients, chunk, room)
            yield bytes_of(coded)

    def settle_feedback(self, *, accepted: bool) -> None:
        """What a lossy wire has lost is owed from now on, if the gradient was used."""
        for side in self._sides:
            for feedback in side.feedback.values():
                feedback.commit() if accepted else feedback.rollback()

    # ── the chief ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _to_chief(self) -> Connection:
        return self._sides[0].connection

    def ask(
        self, *, chapter: int, length: int, batch_size: int, left_out: int, stop_epoch: int, at_once: bool = False
    ) -> p.Ticket | p.Ended | p.Waiting:
        """Work in a chapter; waits for it, unless it has to be `at_once`."""
        request = p.Ask(
            container=self.container,
            replica=self.replica,
            incarnation=self.incarnation,
            chapter=chapter,
            length=length,
            batch_size=batch_size,
            left_out=left_out,
            stop_epoch=stop_epoch,
            at_once=at_once,
        )
        if at_once:
            kinds = (p.Ticket, p.Ended, p.Waiting)
            answer: p.Ticket | p.Ended | p.Waiting = self._to_chief.call(request, kinds, read=self._take_buffers)
        else:
            answer = self._to_chief.wait(request, (p.Ticket, p.Ended), read=self._take_buffers)
        if not isinstance(answer, p.Waiting):
            self.step = max(self.step, answer.step)
        return answer

    def _take_buffers(self, channel: Channel[p.Reply], length: int) -> None:
        if length:
            for _, buffer in self._buffers:
                received = torch.empty_like(buffer, memory_format=torch.contiguous_format)
                channel.read_body(bytes_of(received))
                buffer.copy_(received)

    def report(self, ticket: int, loss: float) -> p.Settled | p.Ticket:
        request = p.Report(
            container=self.container,
            replica=self.replica,
            incarnation=self.incarnation,
            ticket=ticket,
            pulled=self._pulled,
            loss=loss,
            options=[plain_options(group) for group in self.options_from.param_groups],
        )
        buffers = [bytes_of(buffer) for _, buffer in self._buffers]
        answer: p.Settled | p.Ticket = self._to_chief.wait(request, (p.Settled, p.Ticket), body=lambda: buffers)
        if isinstance(answer, p.Settled):
            self.step, self.chief = answer.step, answer.chief
            self.settle_feedback(accepted=answer.accepted is not None)
        return answer

    def task(self, name: str, length: int, work: Callable[[range], list[float]]) -> list[float]:
        """Do parts of a task until it is done, by whomever; its result."""
        mine = {"container": self.container, "replica": self.replica, "incarnation": self.incarnation, "name": name}
        while True:
            answer = self._to_chief.wait(p.Task(**mine, length=length), (p.Part, p.Result))  # type: ignore[arg-type]
            if isinstance(answer, p.Result):
                self.chief = answer.chief
                return list(answer.values)
            values = work(range(answer.start, answer.stop))
            self._to_chief.call(p.TaskDone(**mine, part=answer.part, values=values), p.Done)  # type: ignore[arg-type]

    def once(self, name: str, act: Callable[[], None]) -> None:
        """One replica acts, whichever comes first; the others wait for it."""

        def work(_: range) -> list[float]:
            act()
            return []

        self.task(name, 1, work)

    def set_rule(self, rule: Any) -> None:
        self._to_chief.call(p.SetRule(container=self.container, rule=rule), p.Done)

    # ── steps that somebody else decides ─────────────────────────────────────────────────────────────────

    def steps_made(self) -> int:
        """By the servers, so far."""
        listed: p.Listed = self._to_chief.call(p.Containers(), p.Listed)
        return next(container.step for container in listed.containers if container.name == self.container)

    def measure(self, close: Close) -> float:
        """The squared length of that step's gradient."""
        options = [plain_options(group) for group in self.optimizer.param_groups]
        request = p.Apply(container=self.container, close=close, options=options, measure=True)
        return float(sum(side.connection.call(request, p.Measured).squared for side in self._sides))

    def make(self, close: Close, scale: float) -> None:
        """Have all servers make that step, unless they have."""
        options = [plain_options(group) for group in self.optimizer.param_groups]
        request = p.Apply(container=self.container, close=close, options=options, scale=scale)
        for side in self._sides:
            side.connection.call(request, p.Done)

    def request_stop(self) -> None:
        self._to_chief.call(p.Stop(container=self.container), p.Done)

    def notes(self) -> bytes:
        """The chief's books."""
        body = bytearray()

        def read(channel: Channel[p.Reply], length: int) -> None:
            body.extend(channel.read_whole_body(length))

        self._to_chief.call(p.Notes(container=self.container), p.Tensors, read=read)
        return bytes(body)

    # ── everything, as whole tensors ─────────────────────────────────────────────────────────────────────

    def freeze(self) -> int:
        """Have all servers keep a copy of everything after one and the same step; its number."""
        return int(self._to_chief.call(p.Freeze(container=self.container), p.Copied).number)

    def thaw(self, copy: int) -> None:
        for side in self._sides:
            side.connection.call(p.Thaw(container=self.container, number=copy), p.Done)

    def read_parameters(self, copy: int) -> dict[str, torch.Tensor]:
        """Whole tensors by name, of a frozen copy."""
        return self._read_whole(p.Frozen(container=self.container, number=copy, what="parameters"))[0]

    def read_books(self, copy: int) -> dict[str, Any]:
        """The chief's books, of a frozen copy."""
        body = bytearray()

        def read(channel: Channel[p.Reply], length: int) -> None:
            body.extend(channel.read_whole_body(length))

        self._to_chief.call(p.Frozen(container=self.container, number=copy, what="books"), p.Tensors, read=read)
        found: dict[str, Any] = json.loads(body)
        return found

    def read_table_gradient(self, table: int) -> torch.Tensor:
        """The summed gradient of the last step, as a whole table."""
        lookup = self.tables[table]
        whole = torch.zeros(lookup.rows, lookup.width)
        for number, side in enumerate(self._sides):
            request = p.Frozen(container=self.container, number=0, what=f"rows {table}")
            found = self._read_entries(side, request)
            whole[found["ids"] * len(self._sides) + number] = found["values"]
        return whole

    def read_gradients(self) -> dict[str, torch.Tensor]:
        """The summed gradients of the last step, of those parameters that have one (while recording)."""
        gradients, replies = self._read_whole(p.Frozen(container=self.container, number=0, what="sums"))
        touched = [{int(slot) for slot, _, _ in reply.entries} for reply in replies]
        return {
            name: gradient
            for name, gradient in gradients.items()
            if any(part.slot in touched[part.server] for part in self.shards.parts[name])
        }

    def _read_whole(self, request: p.Frozen) -> tuple[dict[str, torch.Tensor], list[p.Tensors]]:
        flats, replies = [], []
        for side in self._sides:
            flat = torch.empty(side.layout.bytes, dtype=torch.uint8)
            replies.append(side.connection.call(request, p.Tensors, read=_into(flat)))
            flats.append(flat)
        found = {}
        for name, parameter in self._parameters.items():
            whole = torch.empty(parameter.shape, dtype=parameter.dtype)
            for part in self.shards.parts[name]:
                values = _slot(flats[part.server], self._sides[part.server].layout, part.slot)
                whole.view(-1)[part.start : part.stop] = values
            found[name] = whole
        return found, replies

    def read_state(self, copy: int) -> dict[str, dict[str, Any]]:
        """The optimizer's state by parameter name, of a frozen copy."""
        by_slot = [self._read_state_of(side, copy) for side in self._sides]
        found: dict[str, dict[str, Any]] = {}
        for name, parameter in self._parameters.items():
            for part in self.shards.parts[name]:
                for key, value in by_slot[part.server].get(part.slot, {}).items():
                    state = found.setdefault(name, {})
                    if self.shards.whole or not isinstance(value, torch.Tensor) or value.dim() == 0:
                        state[key] = value  # one for the whole tensor
                    else:
                        whole = state.setdefault(key, torch.empty(parameter.shape, dtype=value.dtype))
                        whole.view(-1)[part.start : part.stop] = value
        return found

    def _read_state_of(self, side: _Side, copy: int) -> dict[int, dict[str, Any]]:
        states: dict[int, dict[str, Any]] = {}
        request = p.Frozen(container=self.container, number=copy, what="state")
        for flat_name, value in self._read_entries(side, request).items():
            slot, _, key = flat_name.partition("/")
            states.setdefault(int(slot), {})[key] = value
        return states

    @staticmethod
    def _read_entries(side: _Side, request: p.Frozen) -> dict[str, Any]:
        """Named tensors and numbers of a copy."""
        body = bytearray()
        reply: p.Tensors = side.connection.call(
            request, p.Tensors, read=lambda channel, length: body.extend(channel.read_whole_body(length))
        )
        found: dict[str, Any] = {}
        offset = 0
        for name, dtype, shape in reply.entries:
            kind: torch.dtype = getattr(torch, dtype)
            size = kind.itemsize * torch.Size(shape).numel()
            raw = bytearray(memoryview(body)[offset : offset + size])
            found[name] = torch.frombuffer(raw, dtype=kind).view(shape) if size else torch.empty(shape, dtype=kind)
            offset += size
        return {**found, **dict(reply.numbers)}

    def restore(
        self, parameters: dict[str, torch.Tensor], states: dict[str, dict[str, Any]], step: int, chief: bytes
    ) -> None:
        """Give all servers these values, and the chief its books."""
        for number, side in enumerate(self._sides):
            flat = torch.zeros(side.layout.bytes, dtype=torch.uint8)
            entries: list[tuple[int, str, str, tuple[int, ...]]] = []
            numbers: list[tuple[int, str, float]] = []
            born: list[int] = []
            body = [bytes_of(flat)]
            for name, parameter in self._parameters.items():
                for part in (part for part in self.shards.parts[name] if part.server == number):
                    values = parameters[name].detach().reshape(-1)[part.start : part.stop]
                    _slot(flat, side.layout, part.slot).copy_(values)
                    for key, value in states.get(name, {}).items():
                        if not isinstance(value, torch.Tensor):
                            numbers.append((part.slot, key, float(value)))
                            continue
                        own = value.detach()
                        if (own.shape == parameter.shape and own.numel() > 1) or own.numel() == parameter.numel() > 1:
                            own = own.reshape(-1)[part.start : part.stop]
                        own = own.contiguous()
                        entries.append((part.slot, key, type_name(own), tuple(own.shape)))
                        body.append(bytes_of(own))
                    if states.get(name):
                        born.append(part.slot)
            request = p.Restore(
                container=self.container,
                step=step,
                entries=entries,
                numbers=numbers,
                born=born,
                chief=chief if number == 0 else b"",
                buffers=bool(chief) and number == 0,
            )
            if request.buffers:
                body += [bytes_of(tensor) for _, tensor in [*self._buffers, *self._frozen]]
            side.connection.call(request, p.Done, body=lambda body=body: body)  # type: ignore[misc]
        self.step = step

    def leave(self) -> None:
        request = p.Leave(container=self.container, replica=self.replica, incarnation=self.incarnation)
        self._to_chief.call(request, p.Done, timeout_s=5.0)

    def begin(self, ticket: int | None = None) -> None:
        """A step begins: whatever backward produces from now on belongs to it."""
        self._ticket = ticket
        self._landing.begin()
        self.collector.begin()
        for lookup in self.tables:
            lookup.forget()

    def give_up(self) -> None:
        """From any thread: whoever waits for a server fails."""
        for side in self._sides:
            side.connection.give_up()

    def close(self) -> None:
        self.collector.close()
        for lookup in self.tables:
            lookup.close()
        for side in self._sides:
            side.connection.close()
            if side.arena is not None:
                side.arena.arena.close()


class _Pieces:
    """Several places for the parts of one gradient."""

    def __init__(self, pieces: Sequence[tuple[torch.Tensor, Part]]) -> None:
        self._pieces = pieces

    def put(self, gradient: torch.Tensor) -> None:
        flat = _dense(gradient)
        for view, part in self._pieces:
            view.copy_(flat[part.start : part.stop])

    def add(self, gradient: torch.Tensor) -> None:
        flat = _dense(gradient)
        for view, part in self._pieces:
            view.add_(flat[part.start : part.stop])

    def zero(self) -> None:
        for view, _ in self._pieces:
            view.zero_()


def _into(flat: torch.Tensor) -> Callable[[Channel[p.Reply], int], None]:
    def read(channel: Channel[p.Reply], _: int) -> None:
        channel.read_body(bytes_of(flat))

    return read


def _table_spec(lookup: Lookup, group: int | None) -> TableSpec:
    if group is None:
        raise ModelError("model", lookup.name, "the optimizer does not have it; give it all parameters of the model")
    return TableSpec(lookup.name, lookup.rows, lookup.width, group, lookup.module.weight.is_meta)


def _rows_on(lookup: Lookup, server: int, servers: int) -> int:
    return len(range(server, lookup.rows, servers))


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return (gradient if gradient.layout is torch.strided else gradient.to_dense()).reshape(-1)


def _slot(flat: torch.Tensor, layout: Layout, number: int) -> torch.Tensor:
    slot = layout.slots[number]
    return flat[slot.offset : slot.offset + slot.bytes].view(slot.dtype)


def _elements(flat: torch.Tensor, layout: Layout, parts: Sequence[Part], like: torch.Tensor) -> torch.Tensor:
    """All parts of a parameter, which lie one after another, as one tensor of its shape."""
    start = layout.slots[parts[0].slot].offset
    return flat[start : start + like.numel() * like.dtype.itemsize].view(like.dtype).view(like.shape)
