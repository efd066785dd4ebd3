"""A replica that is cut over several devices, each a process, in a run with servers.

The first device, the *leader*, turns to the servers as any other replica does, on a copy of the model that stays whole,
and tells the others what they have answered. So all devices take the same way through the script.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.central.chief.books import Books
from paceline.central.client.whole_tensors import WholeTensors
from paceline.central.messages.replies import BooksRead, Described, Ended, Ticket
from paceline.central.messages.requests import Describe, ReadBooks
from paceline.central.replica.books_and_state import with_counted
from paceline.central.replica.devices import (
    ActDone,
    ComputeTicket,
    Devices,
    EvaluatePart,
    EvaluationTotal,
    StepClosed,
    TicketTaken,
)
from paceline.central.replica.engine import CentralizedEngine, servers_of
from paceline.central.replica.ticket_samples import TicketSamples
from paceline.central.shards import Shards, describe
from paceline.data.ledger import Ledger
from paceline.data.script_call import ScriptCall
from paceline.evaluations import EvaluationKey
from paceline.exchange.board import Board
from paceline.exchange.words import Phase, Word
from paceline.findings import ServersAccount
from paceline.loop.engine import Batch, Chapter, Closed, Computed, ServersControl
from paceline.loop.run_state import RunState, StateByName
from paceline.loop.script_position import ScriptPosition
from paceline.optim.models import grouped_parameters, lent
from paceline.rules import Rule
from paceline.run_place import Place
from paceline.split.cut import Function
from paceline.strategy import Centralized


class LeadingEngine(CentralizedEngine):
    """The engine of the leader."""

    def __init__(
        self,
        devices: Devices,
        whole: nn.Module,
        own: Optimizer,
        place: Place,
        strategy: Centralized,
        clip_norm: float | None,
    ) -> None:
        """`whole`, `own`: a copy of the model and the optimizer, which stay whole."""
        self._devices, self._whole = devices, whole
        super().__init__(whole, own, place, strategy, clip_norm)
        devices.meet()  # from here on there is a container, which others may ask too

    def prepare(self, function: Function, given: Any) -> None:
        self._devices.prepare(function, given)

    def compute(self, function: Function, given: Any) -> Any:
        return self._devices.answer(function, given)

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        self._devices.take_buffers()
        with lent(self._devices.model, self.client.whole.parameters_now(self.client.version)):
            yield self._devices.model

    def agree(self, call: ScriptCall) -> None:
        super().agree(call)
        self._devices.agree(call)

    def ask(self, chapter: Chapter) -> Sequence[Ticket] | Ended:
        answer = super().ask(chapter)
        self._devices.tell(TicketTaken(answer if isinstance(answer, Ended) else answer[0], self.client.step))
        if isinstance(answer, Ended):
            self._devices.spread(self._whole)
        return answer

    def step(self, batches: Sequence[Batch]) -> Closed:
        closed = super().step(batches)
        seen = self._board.get(self._row, Word.SAMPLES_SEEN) if self._board is not None else 0
        self._devices.tell(StepClosed(closed.loss, closed.samples, closed.count, self.client.step, seen, closed.logged))
        return closed

    def _compute(self, batch: Batch, ticket: Ticket) -> Computed:
        self._devices.tell(ComputeTicket(ticket))
        self._devices.spread(self._whole)
        computed = self._devices.compute(batch, ticket)
        self._devices.gather(self._whole)
        return computed

    def total(self, key: EvaluationKey, call: ScriptCall, over: Callable[[range], torch.Tensor]) -> torch.Tensor:
        self._devices.agree(call)

        def together(part: range) -> torch.Tensor:
            self._devices.tell(EvaluatePart(part.start, part.stop))
            self._devices.spread(self._whole)
            return self._devices.measured(over(part))

        total = super().total(key, call, together)
        self._devices.tell(EvaluationTotal(total.tolist()))
        return total

    def once(self, number: int, act: Callable[[], None]) -> None:
        super().once(number, act)
        self._devices.tell(ActDone(self.client.step))

    def take_state(self, model: dict[str, torch.Tensor], optimizer: StateByName, state: RunState) -> None:
        super().take_state(model, optimizer, state)
        self._devices.leave_buffers(self._whole)
        self._devices.tell(ActDone(self.client.step))

    def close(self) -> None:
        super().close()
        self._devices.close()


class FollowingEngine:
    """The engine of every other device: it does what the leader says."""

    joining = False
    in_step = False
    in_charge = False
    at_once = 1
    state_for_joining: Callable[[], RunState]
    gradients_ready: Callable[[], None] | None = None

    def __init__(self, devices: Devices, optimizer: Optimizer, place: Place, strategy: Centralized) -> None:
        assert place.board is not None
        self._devices = devices
        self._row = place.row
        self._board = Board(place.board)
        self._steps = 0
        self.rule: Rule = strategy.rule  # the leader tells the servers if it changes
        servers = servers_of(place, self._board.get(self._row, Word.ARENAS))
        self._container = servers.container
        # For what a script may ask about the run as a whole, and to compute with the model by itself.
        who = f"device {place.device} of replica {place.replica}"
        count = len(servers.addresses)
        self._connections = [servers.connection(number, who, strategy.timeout_s) for number in range(count)]
        self._to_chief = self._connections[0]
        shards = Shards(describe(grouped_parameters(devices.model, optimizer), optimizer, count, []))
        self._parameters = WholeTensors(self._connections, shards, self._container)
        devices.meet()
        self._board.enter(self._row, Phase.BETWEEN)

    # ── what can be asked ────────────────────────────────────────────────────────────────────────────────

    @property
    def servers(self) -> ServersControl | None:
        return self

    @property
    def accepting(self) -> int:
        return int(self._to_chief.call(Describe(container=self._container), Described).accepting)

    @property
    def staleness(self) -> dict[int, int]:
        return self._books().staleness

    def account(self) -> ServersAccount:
        books = self._books()
        return ServersAccount(books.staleness, books.late, books.dropped)

    def _books(self) -> Books:
        read: BooksRead = self._to_chief.call(ReadBooks(container=self._container), BooksRead)
        return read.books

    def steps(self, position: ScriptPosition) -> int:
        return self._steps

    def ledger(self, position: ScriptPosition) -> Ledger | None:
        return with_counted(position.ledger, position.chapter, self._books()) if position.ledger is not None else None

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────────

    def agree(self, call: ScriptCall) -> None:
        self._devices.agree(call)

    def samples(self, chapter: Chapter) -> TicketSamples:
        return TicketSamples(chapter, self._ask, lambda: None)

    def _ask(self, chapter: Chapter) -> Sequence[Ticket] | Ended:
        order = self._devices.hear(TicketTaken)
        self._steps = order.steps
        if isinstance(order.answer, Ended):
            self._devices.spread()
            return order.answer
        return [order.answer]

    def expect(self, steps: int) -> None:
        """The leader says so."""

    def prepare(self, function: Function, given: Any) -> None:
        self._devices.prepare(function, given)

    def compute(self, function: Function, given: Any) -> Any:
        return self._devices.answer(function, given)

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        self._devices.take_buffers()
        with lent(self._devices.model, self._parameters.parameters_now(self._steps)):
            yield self._devices.model

    def meet_devices(self) -> None:
        raise AssertionError("with servers there is no predictor")

    def join(self) -> RunState:
        raise AssertionError("whoever is started again takes part at once")

    def rest(self) -> None:
        """It works only while it is called."""

    def step(self, batches: Sequence[Batch]) -> Closed:
        (batch,) = batches
        board, row = self._board, self._row
        board.begin_step(row, batch.work.step)
        while isinstance(order := self._devices.hear(ComputeTicket, StepClosed), ComputeTicket):
            began = time.monotonic_ns()
            board.enter(row, Phase.COMPUTING)
            self._devices.spread()
            self._devices.compute(batch, order.ticket)
            board.set(row, Word.COMPUTE_NS, time.monotonic_ns() - began)
        self._steps = order.steps
        board.set_float(row, Word.MEAN_LOSS, order.loss)
        board.set(row, Word.STEP, order.steps)
        board.set(row, Word.SAMPLES_SEEN, order.seen)
        board.enter(row, Phase.BETWEEN)
        return Closed(order.loss, order.samples, order.replicas, logged=order.logged)

    def total(self, key: EvaluationKey, call: ScriptCall, over: Callable[[range], torch.Tensor]) -> torch.Tensor:
        self.agree(call)
        while isinstance(order := self._devices.hear(EvaluatePart, EvaluationTotal), EvaluatePart):
            self._board.enter(self._row, Phase.EVALUATING)
            self._devices.spread()
            self._devices.measured(over(range(order.start, order.stop)))
        self._board.enter(self._row, Phase.BETWEEN)
        return torch.tensor(order.values, dtype=torch.float64)

    def once(self, number: int, act: Callable[[], None]) -> None:
        self._steps = self._devices.hear(ActDone).steps
        self._board.enter(self._row, Phase.BETWEEN)

    # ── whole tensors, which the leader has ──────────────────────────────────────────────────────────────

    def model_state(self) -> dict[str, torch.Tensor]:
        return {}

    def optimizer_state(self) -> StateByName:
        return {}

    def gradients(self) -> dict[str, torch.Tensor]:
        return {}

    def snapshot(self, state: RunState) -> tuple[dict[str, torch.Tensor], StateByName, RunState]:
        return {}, {}, state

    def take_state(self, model: dict[str, torch.Tensor], optimizer: StateByName, state: RunState) -> None:
        self.once(0, lambda: None)
        self._parameters.forget()

    def kept_by_hosts(self) -> dict[str, torch.Tensor]:
        return {}

    def take_kept_by_hosts(self, saved: dict[str, torch.Tensor]) -> None:
        """Hosts exchange with servers, and not with each other."""

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._devices.close()
