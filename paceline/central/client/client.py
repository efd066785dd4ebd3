"""A replica's side of the servers: takes its place among the replicas, takes work, hands it in.

How parameters get to the model is told in `pulling`, how gradients get to the servers in `pushing`, rows of tables have
`table_rows`, and whole tensors `whole`. For each server there is a `ServerView`.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.central.chief.books import Books
from paceline.central.chief.tasks import FillTask, TaskKey
from paceline.central.chief.tickets import Close
from paceline.central.client.initial_values import InitialValues, receive
from paceline.central.client.pulling import Pulls
from paceline.central.client.pushing import Pushes
from paceline.central.client.server_view import ServerAddresses, ServerView
from paceline.central.client.table_rows import TableRows
from paceline.central.client.tasks import do_task
from paceline.central.client.whole_tensors import State, WholeTensors
from paceline.central.client.written_parameters import WrittenParameters
from paceline.central.messages import replies, requests
from paceline.central.messages.connection import Connection
from paceline.central.messages.settings import Settings
from paceline.central.messages.tensor_bytes import bytes_of
from paceline.central.shards import Shards, describe, plain_options
from paceline.central.tables.embedding import find_tables
from paceline.data.script_call import ScriptCall
from paceline.deadlines import CallLimit
from paceline.errors import ArenaError, CheckpointError
from paceline.loop.engine import Chapter
from paceline.loss_value import LossPart
from paceline.machine import machine_identity
from paceline.memory.arena import Arena
from paceline.memory.server_arena import ServerArena
from paceline.net.frames import Channel, ConnectionLost
from paceline.optim.gradients import GradientCollector
from paceline.optim.models import group_sizes, grouped_parameters, own_state, refuse_added_parameters

__all__ = ["Client", "ServerAddresses"]

Found = TypeVar("Found")

STILL_GOOD_S = 0.05  # so long a ticket that has come with an answer is not asked for again


class Client:
    """Speaks to the servers for one replica of one container."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        servers: ServerAddresses,
        settings: Settings,
        *,
        replica: int,
        incarnation: int,
        wire_name: str = "fp32",
        share_memory: bool = True,
        only_tables: bool = False,
        computed_with: nn.Module | None = None,
        ended: Callable[[], Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        """`only_tables`: everything but sparse embeddings stays with the replica. `computed_with`: the model that
        gradients are of, if `model` is only its copy. `ended` returns replicas, and the
        incarnations of their processes, that are known to have ended."""
        self.model = model
        self.optimizer = self.options_from = optimizer
        self.replica, self.incarnation = replica, incarnation
        self.container = servers.container
        self._mine: dict[str, Any] = {"container": servers.container, "replica": replica, "incarnation": incarnation}
        self._settings = settings
        self._group_sizes = group_sizes(optimizer)
        self._servers = servers
        self._wire = wire_name
        self._share_memory = share_memory
        self.tables = find_tables(model)
        listed = grouped_parameters(model, optimizer)
        groups = {name: group for name, _, group in listed}
        sparse = {lookup.name for lookup in self.tables}
        named = [entry for entry in listed if entry[0] not in sparse and not only_tables]
        specs = [lookup.spec(groups[lookup.name]) for lookup in self.tables]
        self.spec = describe(named, optimizer, len(servers.addresses), specs)
        self.shards = Shards(self.spec)
        parameters = {name: parameter for name, parameter, group in named if group is not None}
        frozen = [(name, parameter) for name, parameter, group in named if group is None]
        self._buffers = [] if only_tables else list(own_state(model).named_buffers())
        self._checks = [zlib.crc32(bytes_of(parameters[name])) for name in self.shards.names]
        self._connect = partial(servers.connection, who=f"replica {replica}", timeout_s=settings.timeout_s)
        self._views = [
            ServerView(self._connect(number, first_contact_s=servers.first_contact_s), layout)
            for number, layout in enumerate(self.shards.layouts)
        ]
        for number, view in enumerate(self._views):
            view.connection.introduce = self._introducer(number)
        self._ended = ended
        self._to_chief.while_waiting = self._tell_who_has_ended
        self.chief = replica == 0
        self.step = 0  # closed so far by its run, as far as this replica knows
        self.version = 0  # of the parameters, likewise: steps of other runs count too
        self._first: int | None = None  # the place of its run's first replica in the container
        self._asked: requests.Ask | None = None
        self._next: replies.Ticket | None = None  # what has come with the answer to the last report
        self._settled_at = 0.0  # when that was
        self._moving = threading.Lock()
        self._pulls = Pulls(
            self._views,
            self.shards,
            parameters,
            container=self.container,
            wire_name=wire_name,
            timeout_s=settings.timeout_s,
        )
        self.written = WrittenParameters(parameters, self._pulls, settings.replicas)
        self.rows = TableRows(self.tables, self._views, self._pulls, self.container)
        others = [tensor for _, tensor in (*self._buffers, *frozen)]
        connections = [view.connection for view in self._views]
        self.whole = WholeTensors(connections, self.shards, self.container, others)
        self._pushes: Pushes | None = None  # there is no place for gradients yet
        try:
            self._open(InitialValues(model, optimizer, parameters, self._buffers, frozen, self.container))
        except BaseException:
            for view in self._views:
                view.connection.close()
            raise
        sources = dict(own_state(computed_with).named_parameters()) if computed_with is not None else parameters
        self._pushes = Pushes(
            self._views,
            self.shards,
            sources,
            push=partial(requests.Push, **self._mine | {"replica": self.place}, wire=wire_name),
            place=self.place,
            early=not self.tables,
            announced=settings.durability != "none",
        )

    # ── opening ──────────────────────────────────────────────────────────────────────────────────────────

    def _introducer(self, number: int) -> Callable[[], None]:
        view = self._views[number]

        def introduce() -> None:
            again = view.opened is not None
            request = requests.Open(
                **self._mine,
                spec=self.spec,
                settings=self._settings,
                addresses=list(self._servers.addresses),
                server=number,
                machine=machine_identity() if self._share_memory else "apart",
                checks=self._checks if number == 0 else [],
                first=self._first,
            )
            opened = view.opened = view.connection.call(request, replies.Opened)
            if number == 0:
                self._first = opened.first
            if again:
                self._check_not_behind(view.opened, number)
                self._moved(view, number)

        return introduce

    def _check_not_behind(self, opened: replies.Opened, number: int) -> None:
        """Refuse a server that has come back without what it had acknowledged."""
        if self._pushes is not None and (opened.step < self.version or not opened.filled):
            has = f"is at step {opened.step}" if opened.filled else "has nothing"
            raise CheckpointError(
                f"server {number} {has} after it was started again, and had acknowledged step {self.version}: what it "
                f"kept of container {self.container!r} was lost or replaced; go on from a checkpoint"
            )

    def _open(self, initial: InitialValues) -> None:
        for view in self._views:
            view.connection.call(requests.Containers(), replies.Listed)  # connects, and is introduced
            assert view.opened is not None
            if view.opened.arena is not None:
                view.arena = self._found_alive(view, partial(self._attach, view))
                view.gradients = view.arena.gradients[self.place]
            else:
                view.use_own_memory(self._wire)
        first = self._views[0].opened
        assert first is not None
        filled = all(view.opened is not None and view.opened.filled for view in self._views)
        # Before the first step somebody may still be giving the servers tables, or state.
        if not filled or (first.step == 0 and not first.reopened):
            self.once(FillTask(), lambda: initial.fill(self._views, self.tables, self.whole))
        self.step, self.version = first.made, first.step
        self._pulls.place = self.place
        if first.reopened:
            initial.take_what_is_not_trained(self._to_chief)
        for number, view in enumerate(self._views):
            self._found_alive(view, partial(self.rows.attach, number))
        self.rows.connect([self._connect(number) for number in range(len(self._views))])

    def _attach(self, view: ServerView) -> ServerArena:
        assert view.opened is not None
        assert view.opened.arena is not None
        assert view.opened.place is not None
        arena = ServerArena(Arena.attach(*view.opened.arena), view.layout)
        arena.take_place(self.place, Arena.attach(*view.opened.place))
        return arena

    def _found_alive(self, view: ServerView, attach: Callable[[], Found]) -> Found:
        """Return what `attach` finds in a server's memory. One that has died since is asked once more where it is."""
        while True:
            opened = view.opened
            try:
                return attach()
            except ArenaError:
                view.connection.call(requests.Containers(), replies.Listed)
                if view.opened is opened:
                    raise  # it is there, and was when it said so

    def _moved(self, view: ServerView, number: int) -> None:
        """The server was started again: its memory is another one. What this replica has in it goes there too."""
        assert view.opened is not None
        old = view.arena
        if old is None or view.opened.arena is None:
            return
        with self._moving:
            try:
                new = self._attach(view)
                if view.tables:
                    self.rows.attach(number)
            except ArenaError as error:
                raise ConnectionLost("it has died again") from error
            new.gradients[self.place].copy_(view.gradients)
            if self._pulls.has_copy:
                new.pulled[self.place].copy_(old.pulled[self.place])
            view.arena, view.gradients = new, new.gradients[self.place]
            if self._pushes is not None:
                self._pushes.moved()
            old.close()
            self._pulls.moved()

    @property
    def place(self) -> int:
        """Where this replica leaves its gradients, on every server."""
        assert self._first is not None
        return self._first + self.replica

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _pushing(self) -> Pushes:
        assert self._pushes is not None
        return self._pushes

    @property
    def collector(self) -> GradientCollector:
        return self._pushing.collector

    @property
    def pulled(self) -> int:
        """The version of the parameters that the model points at; -1: it has to pull first."""
        return self._pulls.pulled

    def pull(self, *, sync: bool) -> None:
        """Have the parameters as they are now. In a sync run nobody writes them while somebody computes."""
        self.written.take()
        self._pulls.pull(sync=sync, at_least=self.version)

    def expect(self, batches: Sequence[Any]) -> None:
        """What will be computed next. Not while something is being computed."""
        self.rows.expect(batches, self.version)

    def begin(self, ticket: int | None = None) -> None:
        """A step begins: whatever backward produces from now on belongs to it."""
        self._pushing.begin(ticket)
        self.rows.begin()

    def begin_pass(self, batch: Any, *, is_last: bool) -> None:
        """Forward and backward of this batch follow; `is_last`: and no more in this step."""
        self.rows.begin_pass(batch)
        self.collector.last_pass(is_last)

    def push(self, ticket: int, used: Sequence[bool]) -> None:
        """Leave the gradient that the collector has gathered with all servers."""
        self.rows.end()
        self._pushing.push(ticket, used, self.rows.take_gradients())

    def abandon(self) -> None:
        """The step will not be completed."""
        self.rows.end()
        self._pushing.abandon()

    # ── the chief ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _to_chief(self) -> Connection:
        return self._views[0].connection

    def ask(
        self, chapter: Chapter, call: ScriptCall | None, *, at_once: bool = False
    ) -> replies.Ticket | replies.Ended | replies.Waiting:
        """Work in a chapter; waits for it, unless it has to be `at_once`. What comes after it is asked for with the
        report on it. `call`: in which it is asked."""
        ledger = chapter.ledger
        assert ledger.length is not None
        request = requests.Ask(
            **self._mine,
            chapter=chapter.number,
            length=ledger.length,
            batch_size=ledger.batch_size,
            left_out=ledger.length % ledger.batch_size if ledger.drop_last else 0,
            stop_epoch=chapter.stop_epoch,
            call=call,
            at_once=at_once,
        )
        coming, self._next = self._next, None
        # After a pause it may be late already, or of a chief that has died since: then the chief is asked whether not.
        if coming is not None and request == self._asked and time.monotonic() - self._settled_at < STILL_GOOD_S:
            return coming
        self._asked = None if at_once else request
        ask = self._to_chief.call if at_once else self._to_chief.wait
        kinds = (replies.Ticket, replies.Ended, replies.Waiting)
        answer: replies.Ticket | replies.Ended | replies.Waiting = ask(request, kinds, read=self._take_buffers)
        if not isinstance(answer, replies.Waiting):
            self.step = max(self.step, answer.step)
            self.version = max(self.version, answer.version)
        return answer

    def _take_buffers(self, channel: Channel[replies.Reply], length: int) -> None:
        if length:
            receive(channel, self._buffers)

    def report(self, ticket: int, loss: LossPart) -> replies.Settled | replies.Ticket:
        refuse_added_parameters(self.options_from, self._group_sizes)
        request = requests.Report(
            **self._mine,
            ticket=ticket,
            pulled=self._pulls.version,
            loss=loss,
            options=[plain_options(group) for group in self.options_from.param_groups],
            ask=self._asked,
        )
        buffers = [bytes_of(buffer) for _, buffer in self._buffers]
        answer: replies.Settled | replies.Ticket = self._to_chief.wait(
            request, (replies.Settled, replies.Ticket), body=lambda: buffers, read=self._take_buffers
        )
        if isinstance(answer, replies.Settled):
            self.step, self.version = answer.step, answer.version
            self.chief, self._next = answer.chief, answer.next
            self._settled_at = time.monotonic()
            self._pushing.settle(accepted=answer.accepted is not None)
        return answer

    def _tell_who_has_ended(self) -> None:
        """A replica that ended before it had come to the servers is expected there, and nobody else would say so."""
        for replica, incarnation in self._ended() if self._ended is not None else ():
            leave = requests.Leave(container=self.container, replica=replica, incarnation=incarnation)
            self._to_chief.call(leave, replies.Done)

    def give_back(self, held: replies.Ticket | None = None, timeout_s: float | None = None) -> None:
        """Give back the ticket that came with the last report, before something else is done, or the one that is
        `held`: others may need it."""
        ticket, self._next = held or self._next, None
        if ticket is not None:
            request = requests.GiveBack(**self._mine, ticket=ticket.ticket)
            self._to_chief.call(request, replies.Done, timeout_s=timeout_s)

    def task(
        self,
        key: TaskKey,
        length: int,
        work: Callable[[range], list[float]],
        call: ScriptCall | None = None,
        limit: CallLimit | None = None,
    ) -> list[float]:
        """Do parts of a task until it is done, by whomever, or until this replica is late; return its result."""
        self.give_back()
        ask = requests.Task(**self._mine, key=key, length=length, call=call, at_once=limit is not None)
        done = do_task(self._to_chief, ask, work, self.model, self._mine, limit)
        self.chief = done.chief
        return list(done.values)

    def once(self, key: TaskKey, act: Callable[[], None]) -> None:
        """Have one replica act, whichever comes first; the others wait for it."""

        def work(_: range) -> list[float]:
            act()
            return []

        self.task(key, 1, work)

    def set_rule(self, rule: Any) -> None:
        self.give_back()  # it was for a step under the rule before
        self._to_chief.call(requests.SetRule(container=self.container, rule=rule), replies.Done)

    def accepting(self) -> int:
        """Return how many gradients make a step now."""
        return int(self._to_chief.call(requests.Describe(container=self.container), replies.Described).accepting)

    def request_stop(self) -> None:
        self._to_chief.call(requests.Stop(container=self.container), replies.Done)

    def books(self) -> Books:
        """Return the chief's books as they are now."""
        read: replies.BooksRead = self._to_chief.call(requests.ReadBooks(container=self.container), replies.BooksRead)
        return read.books

    def restore(self, parameters: dict[str, torch.Tensor], states: dict[str, State], books: Books) -> None:
        """Give all servers these values, and the chief its books."""
        self.whole.restore(parameters, states, books)
        self.has_resumed(books.step)

    def has_resumed(self, step: int) -> None:
        """The container stands where a checkpoint does, after so many steps."""
        self.step = self.version = step
        self.whole.forget()

    # ── steps that somebody else decides ─────────────────────────────────────────────────────────────────

    def steps_made(self) -> int:
        """Return how many steps the servers have made so far."""
        listed: replies.Listed = self._to_chief.call(requests.Containers(), replies.Listed)
        return next(container.step for container in listed.containers if container.name == self.container)

    def measure(self, close: Close) -> float:
        """Return the squared length of that step's gradient."""
        return float(sum(answer.squared for answer in self._apply(close, replies.SquaredNorm, measure=True)))

    def make(self, close: Close, scale: float) -> None:
        """Have all servers make that step, unless they have."""
        self._apply(close, replies.Done, scale=scale)

    def _apply(self, close: Close, expected: type, **how: Any) -> list[Any]:
        options = [plain_options(group) for group in self.optimizer.param_groups]
        request = requests.Apply(container=self.container, close=close, options=options, **how)
        return [view.connection.call(request, expected) for view in self._views]

    # ── ending ───────────────────────────────────────────────────────────────────────────────────────────

    def leave(self) -> None:
        request = requests.Leave(**self._mine)
        self._to_chief.call(request, replies.Done, timeout_s=5.0)

    def give_up(self) -> None:
        """Have whoever waits for a server fail. From any thread."""
        self.rows.give_up()
        for view in self._views:
            view.connection.give_up()

    def close(self) -> None:
        self._next = None  # whoever is gone has nothing any more
        self._pushing.close()
        self.rows.close()
        for view in self._views:
            view.close()
