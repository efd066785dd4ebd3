"""A replica that is cut over several devices, each a process, in a run with servers.

All devices go the same way as any other replica does (`Leased`). Where that one turns to the servers, the leader does
so as well, on a copy of the model that stays whole, and tells the others what they have answered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.central.client.client import Client
from paceline.central.client.whole_tensors import read_bytes
from paceline.central.replica.devices import (
    ActDone,
    ComputeTicket,
    Devices,
    EvaluatePart,
    EvaluationTotal,
    StepClosed,
    TicketTaken,
)
from paceline.central.replica.engine import CentralizedEngine, LeasedEngine, servers_of
from paceline.central.replica.leased import Held, Leased
from paceline.central.wire import protocol as p
from paceline.central.wire.connection import Connection
from paceline.central.wire.protocol import Ended, Ticket
from paceline.data.ledger import Ledger
from paceline.exchange.board import Board, Phase, Word
from paceline.loop.engine import Closed, Computed, StateByName
from paceline.loop.passes import Evaluation, Passes
from paceline.optim.models import copied
from paceline.rules import Rule
from paceline.run_place import Place
from paceline.strategy import Centralized


class CutLeased(Leased):
    """How one device, and all others of its replica with it, goes through the data that a chief hands out."""

    def _open_engine(self, clip_norm: float | None) -> LeasedEngine:
        model, optimizer, place = self._model, self._optimizer, self._place
        if place.row % place.strategy.devices:
            self._devices = Devices(model, optimizer, place)
            return Following(self._devices, place)
        whole, own = copied(model, optimizer, "--servers")  # before it is cut
        self._devices = Devices(model, optimizer, place)
        return Leading(self._devices, whole, own, optimizer, place, clip_norm)

    def _computing(
        self, held: Held, passes: Passes, model: nn.Module, client: Client | None, seed: int | None
    ) -> Callable[[Ticket], Computed]:
        def compute(ticket: Ticket) -> Computed:
            sizes = self._turn_to(held, ticket)
            loss = self._devices.compute(passes, held.micro_batches, sizes, number=held.ticket.step, seed=seed)
            return Computed(loss, sum(sizes))

        return compute

    def evaluate(self, measure: Evaluation, length: int) -> Any:
        self._devices.prepare(measure.call)
        return super().evaluate(measure, length)

    def close(self) -> None:
        super().close()
        self._devices.close()


class Leading(CentralizedEngine):
    """The engine of the leader."""

    def __init__(
        self,
        devices: Devices,
        whole: nn.Module,
        own: Optimizer,
        users: Optimizer,
        place: Place,
        clip_norm: float | None,
    ) -> None:
        """`whole`, `own`: a copy of the model and the optimizer, which stay whole. `users`: that of the user."""
        self._devices, self._whole = devices, whole
        super().__init__(whole, own, place, clip_norm)
        self.client.options_from = users  # which schedulers change

    def ask(self, chapter: int, ledger: Ledger, stop_epoch: int) -> Ticket | Ended:
        answer = super().ask(chapter, ledger, stop_epoch)
        self._devices.tell(TicketTaken(answer, self.steps))
        if isinstance(answer, Ended):
            self._devices.spread(self._whole)
        return answer

    def step(
        self, ticket: Ticket, compute: Callable[[Ticket], Computed], coming: Callable[[], Sequence[Any]]
    ) -> Closed:
        def together(ticket: Ticket) -> Computed:
            self._devices.tell(ComputeTicket(ticket))
            self._devices.spread(self._whole)
            computed = compute(ticket)
            self._devices.gather(self._whole)
            return computed

        closed = super().step(ticket, together, coming)
        seen = self._board.get(self._row, Word.SAMPLES_SEEN) if self._board is not None else 0
        self._devices.tell(StepClosed(closed.loss, closed.samples, closed.count, self.steps, seen))
        return closed

    def total(self, name: str, length: int, work: Callable[[range], torch.Tensor]) -> torch.Tensor:
        def together(part: range) -> torch.Tensor:
            self._devices.tell(EvaluatePart(part.start, part.stop))
            self._devices.spread(self._whole)
            return self._devices.measured(work(part))

        total = super().total(name, length, together)
        self._devices.tell(EvaluationTotal(total.tolist()))
        return total

    def once(self, act: Callable[[], None]) -> None:
        super().once(act)
        self._devices.tell(ActDone(self.steps))

    def take_state(self, model: dict[str, torch.Tensor], optimizer: StateByName, books: dict[str, Any]) -> None:
        super().take_state(model, optimizer, books)
        self._devices.tell(ActDone(self.steps))


class Following:
    """The engine of every other device: it does what the leader says."""

    chief = False
    client = None

    def __init__(self, devices: Devices, place: Place) -> None:
        assert isinstance(place.strategy, Centralized)
        assert place.board is not None
        self._devices = devices
        self._row = place.row
        self._board = Board(place.board)
        self.steps = 0
        self.rule: Rule = place.strategy.rule  # the leader tells the servers if it changes
        self.gradients_ready: Callable[[], None] | None = None
        servers = servers_of(place, self._board.get(self._row, Word.ARENAS))
        self._container = servers.container
        # For what a script may ask about the run as a whole.
        self._to_chief = Connection(
            servers.addresses[0],
            token=servers.token,
            keys=servers.keys,
            who=f"device {self._row % place.strategy.devices} of replica {self._row // place.strategy.devices}",
            name="server 0",
            timeout_s=place.strategy.timeout_s,
        )
        self._board.enter(self._row, Phase.BETWEEN)

    def expect(self, steps: int) -> None:
        """The leader says so."""

    def ask(self, chapter: int, ledger: Ledger, stop_epoch: int) -> Ticket | Ended:
        order = self._hear(TicketTaken)
        self.steps = order.steps
        answer: Ticket | Ended = order.answer
        if isinstance(answer, Ended):
            self._devices.spread()
        return answer

    def step(
        self, ticket: Ticket, compute: Callable[[Ticket], Computed], coming: Callable[[], Sequence[Any]]
    ) -> Closed:
        board, row = self._board, self._row
        board.set(row, Word.STEP, ticket.step)
        while isinstance(order := self._hear(ComputeTicket, StepClosed), ComputeTicket):
            began = time.monotonic_ns()
            board.enter(row, Phase.COMPUTING)
            self._devices.spread()
            compute(order.ticket)
            board.set(row, Word.COMPUTE_NS, time.monotonic_ns() - began)
        self.steps = order.steps
        board.set_float(row, Word.MEAN_LOSS, order.loss)
        board.set(row, Word.STEP, order.steps)
        board.set(row, Word.SAMPLES_SEEN, order.seen)
        board.enter(row, Phase.BETWEEN)
        return Closed(order.loss, order.samples, order.replicas)

    def total(self, name: str, length: int, work: Callable[[range], torch.Tensor]) -> torch.Tensor:
        while isinstance(order := self._hear(EvaluatePart, EvaluationTotal), EvaluatePart):
            self._board.enter(self._row, Phase.EVALUATING)
            self._devices.spread()
            self._devices.measured(work(range(order.start, order.stop)))
        self._board.enter(self._row, Phase.BETWEEN)
        return torch.tensor(order.values, dtype=torch.float64)

    def once(self, act: Callable[[], None]) -> None:
        self.steps = self._hear(ActDone).steps
        self._board.enter(self._row, Phase.BETWEEN)

    def take_state(self, model: dict[str, torch.Tensor], optimizer: StateByName, books: dict[str, Any]) -> None:
        self.once(lambda: None)

    def _hear(self, *kinds: Any) -> Any:
        return self._devices.hear(*kinds)

    # ── what can be asked ────────────────────────────────────────────────────────────────────────────────

    def books(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(bytes(read_bytes(self._to_chief, p.Notes(container=self._container))[1]))
        return found

    def accepting(self) -> int:
        return int(self._to_chief.call(p.Describe(container=self._container), p.Described).accepting)

    def model_state(self) -> dict[str, torch.Tensor]:
        return {}

    def optimizer_state(self) -> StateByName:
        return {}

    def gradients(self) -> dict[str, torch.Tensor]:
        return {}

    def snapshot(self) -> tuple[dict[str, torch.Tensor], StateByName, dict[str, Any]]:
        """Only whoever saves asks for it, which is the leader."""
        return {}, {}, {}

    def close(self) -> None:
        self._to_chief.close()
