"""A replica's side of the servers: takes its place among the replicas, has their parameters and leaves its gradients.

What it says to the chief is in `chief_client`, how parameters get to the model in `pulling`, how gradients get to the
servers in `pushing`; rows of tables have `table_rows`, and whole tensors `whole`. For each server there is a
`ServerView`.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.central.chief.books import Books
from paceline.central.chief.tasks import FillTask
from paceline.central.chief.tickets import Close
from paceline.central.client.chief_client import ChiefClient, WhoAsks
from paceline.central.client.initial_values import InitialValues
from paceline.central.client.pulling import Pulls
from paceline.central.client.pushing import Pushes
from paceline.central.client.server_view import ServerAddresses, ServerView
from paceline.central.client.table_rows import TableRows
from paceline.central.client.whole_tensors import State, WholeTensors
from paceline.central.client.written_parameters import WrittenParameters
from paceline.central.messages import replies, requests
from paceline.central.messages.settings import Settings
from paceline.central.messages.tensor_bytes import bytes_of
from paceline.central.shards import Shards, describe, plain_options
from paceline.central.tables.embedding import find_tables
from paceline.errors import ArenaError, CheckpointError
from paceline.loss_value import LossPart
from paceline.machine import machine_identity
from paceline.memory.arena import Arena
from paceline.memory.server_arena import ServerArena
from paceline.net.frames import ConnectionLost
from paceline.optim.gradients import GradientCollector
from paceline.optim.models import group_sizes, grouped_parameters, own_state, refuse_added_parameters

__all__ = ["Client", "ServerAddresses"]

Found = TypeVar("Found")


class Client(ChiefClient):
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
        self.optimizer = self.options_from = optimizer
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
        buffers = [] if only_tables else list(own_state(model).named_buffers())
        self._checks = [zlib.crc32(bytes_of(parameters[name])) for name in self.shards.names]
        self._connect = partial(servers.connection, who=f"replica {replica}", timeout_s=settings.timeout_s)
        self._views = [
            ServerView(self._connect(number, first_contact_s=servers.first_contact_s), layout)
            for number, layout in enumerate(self.shards.layouts)
        ]
        for number, view in enumerate(self._views):
            view.connection.introduce = self._introducer(number)
        who = WhoAsks(servers.container, replica, incarnation)
        super().__init__(self._views[0].connection, who, model, buffers, ended)
        self._first: int | None = None  # the place of its run's first replica in the container
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
        others = [tensor for _, tensor in (*buffers, *frozen)]
        connections = [view.connection for view in self._views]
        self.whole = WholeTensors(connections, self.shards, self.container, others)
        self._pushes: Pushes | None = None  # there is no place for gradients yet
        try:
            self._open(InitialValues(model, optimizer, parameters, buffers, frozen, self.container))
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

    # ── handing in ───────────────────────────────────────────────────────────────────────────────────────

    def report(self, ticket: int, loss: LossPart) -> replies.Settled | replies.Ticket:
        """Tells the chief that the gradient of a ticket has been left with the servers."""
        refuse_added_parameters(self.options_from, self._group_sizes)
        options = [plain_options(group) for group in self.options_from.param_groups]
        answer = self.hand_in(ticket, loss, self._pulls.version, options)
        if isinstance(answer, replies.Settled):
            self._pushing.settle(accepted=answer.accepted is not None)
        return answer

    def restore(self, parameters: dict[str, torch.Tensor], states: dict[str, State], books: Books) -> None:
        """Give all servers these values, and the chief its books."""
        self.whole.restore(parameters, states, books)
        self.has_resumed(books.step)

    def has_resumed(self, step: int) -> None:
        """The container stands where a checkpoint does, after so many steps."""
        self.step = self.version = step
        self.whole.forget()

    # ── steps that somebody else decides ─────────────────────────────────────────────────────────────────

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

    def give_up(self) -> None:
        """Have whoever waits for a server fail. From any thread."""
        self.rows.give_up()
        for view in self._views:
            view.connection.give_up()

    def close(self) -> None:
        self.forget_next()
        self._pushing.close()
        self.rows.close()
        for view in self._views:
            view.close()
