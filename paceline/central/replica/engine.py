"""The engine of a replica whose parameters live on servers.

It does not divide batches with the other replicas: the chief hands it tickets, and decides which of them make a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.central.chief.books import Books
from paceline.central.chief.tasks import EvaluationTask, OnceTask, ResumeTask
from paceline.central.client.client import Client
from paceline.central.client.server_view import ServerAddresses
from paceline.central.messages.connection import FIRST_CONTACT_S
from paceline.central.messages.replies import Ended, Ticket, Waiting
from paceline.central.messages.settings import Settings
from paceline.central.replica.books_and_state import books_of, with_books, with_counted
from paceline.central.replica.ticket_samples import TicketSamples
from paceline.central.replica.working import ClientWorker, Worked, work_on
from paceline.data.ledger import Ledger
from paceline.data.script_call import ScriptCall
from paceline.deadlines import call_limit
from paceline.errors import DataError, PacelineError, Stalled
from paceline.evaluations import EvaluationKey
from paceline.exchange.board import Board
from paceline.exchange.words import HostWord, Phase, Word
from paceline.findings import ServersAccount
from paceline.loop.engine import Batch, Chapter, Closed, Computed, ServersControl
from paceline.loop.run_state import RunState, StateByName
from paceline.loop.script_position import ScriptPosition
from paceline.net.secure import Keys, read_token
from paceline.optim.host_copy import SameModel
from paceline.optim.models import lent, own_state
from paceline.rules import Rule
from paceline.run_place import Place
from paceline.split.cut import Function
from paceline.strategy import Centralized

COPY_TRIES = 4  # for a copy of everything, while servers are killed
GIVE_BACK_WITHIN_S = 5.0


def servers_of(place: Place, number: int) -> ServerAddresses:
    """Returns where the parameters of the `number`-th trainer of this script are: a second one is another training."""
    servers = place.servers
    assert servers is not None
    return ServerAddresses(
        servers.addresses,
        servers.container if number == 1 else f"{servers.container}-{number}",
        read_token(Path(servers.token_folder)) if servers.token_folder is not None else "",
        Keys.load(Path(servers.keys)) if servers.keys is not None else None,
        FIRST_CONTACT_S if servers.run and not place.restarted else None,  # who returns has found them before
    )


class CentralizedEngine:
    """One replica among several, with servers that own the parameters."""

    joining = False  # one that was started again takes part at once
    in_step = False
    at_once = 1
    state_for_joining: Callable[[], RunState]
    gradients_ready: Callable[[], None] | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        place: Place,
        strategy: Centralized,
        clip_norm: float | None,
        copy: type[SameModel] = SameModel,
    ) -> None:
        """`copy`: what makes of the model the one that servers know, if it is computed with elsewhere."""
        self._copy = copy(model, optimizer)
        self._model = self._copy.model
        self._row = place.row
        self._board = Board(place.board) if place.board is not None else None
        if self._board is not None:
            self._board.announce(self._row)
            self._board.host_set(HostWord.FIRST_REPLICA, place.host * place.rows)
            # The devices of a cut replica have one in common.
            cut = strategy.split is not None
            number = self._board.get(self._row, Word.ARENAS) if cut else self._board.next_arena(self._row)
            incarnation = self._board.get(self._row, Word.INCARNATION)
        else:
            number, incarnation = 1, time.time_ns()
        self._open = partial(
            Client,
            servers=self._find_servers(place, number),
            settings=Settings(
                replicas=strategy.replicas,
                rule=strategy.rule,
                warmup_steps=strategy.warmup_steps,
                warmup_epochs=strategy.warmup_epochs,
                clip_norm=clip_norm,
                durability=strategy.durability,
                recording=place.recording is not None,
                run=place.servers.run if place.servers is not None else "",
                timeout_s=strategy.timeout_s,
            ),
            incarnation=incarnation,
            wire_name=strategy.wire,
            share_memory=strategy.exchange != "tcp",
            ended=None if strategy.in_graph else partial(self._ended, strategy.devices),
        )
        self.client = self.open_client(self._copy, optimizer, place.replica)
        self._worker = ClientWorker(self.client, self._copy)
        if self._board is not None and not self._board.alive(self._row):
            self._board.set(self._row, Word.ADMITTED, incarnation)  # one that was started again takes part at once
        self._rule: Rule = strategy.rule
        self._call: ScriptCall | None = None  # of `batches`, with which this replica asks for work
        self._resumes = 0
        self._sync = True
        self.enter(Phase.BETWEEN)

    def _find_servers(self, place: Place, number: int) -> ServerAddresses:
        return servers_of(place, number)

    def open_client(self, copy: SameModel, users: Optimizer, replica: int) -> Client:
        """Opens a replica of this process. Schedulers change the optimizer that is the user's."""
        client = self._open(copy.model, copy.optimizer, replica=replica, computed_with=copy.on_device)
        client.options_from = users
        return client

    def _ended(self, devices: int) -> list[tuple[int, int]]:
        """Returns the replicas of this host whose processes have ended, as the supervisor has declared them; of a cut
        one its first device's."""
        board = self._board
        if board is None:
            return []
        first = board.host_get(HostWord.FIRST_REPLICA)
        incarnations = ((row, board.get(row, Word.INCARNATION)) for row in range(0, board.replicas, devices))
        return [((first + row) // devices, number - 1) for row, number in incarnations if number % 2 == 0]

    # ── what can be asked ────────────────────────────────────────────────────────────────────────────────

    @property
    def in_charge(self) -> bool:
        return self.client.chief

    @property
    def servers(self) -> ServersControl | None:
        self.rest()
        return self

    @property
    def rule(self) -> Rule:
        return self._rule

    @rule.setter
    def rule(self, rule: Rule) -> None:
        if rule != self._rule:
            self._rule = rule
            self.client.set_rule(rule)

    @property
    def accepting(self) -> int:
        return self.client.accepting()

    @property
    def staleness(self) -> dict[int, int]:
        return self.books().staleness

    def account(self) -> ServersAccount:
        books = self.books()
        return ServersAccount(books.staleness, books.late, books.dropped)

    def books(self) -> Books:
        """Returns the chief's."""
        return self.client.books()

    def steps(self, position: ScriptPosition) -> int:
        return self.client.step

    def ledger(self, position: ScriptPosition) -> Ledger | None:
        self.rest()
        return with_counted(position.ledger, position.chapter, self.books()) if position.ledger is not None else None

    def expect(self, steps: int) -> None:
        if self._board is not None:
            self._board.host_set(HostWord.TOTAL_STEPS, steps)

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────────

    def agree(self, call: ScriptCall) -> None:
        self._call = call  # the chief compares

    def samples(self, chapter: Chapter) -> TicketSamples:
        if chapter.feed.length is None:
            raise DataError("dataset", "a stream", "with servers give one that has a length")
        return TicketSamples(chapter, self.ask, self.give_back, alone=self.at_once == 1)

    def prepare(self, function: Function, given: Any) -> None:
        """The model is not cut."""

    def compute(self, function: Function, given: Any) -> Any:
        return function(self._copy.on_device, given)

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        # Other replicas may go on meanwhile, and the servers with them: a copy stays as it is.
        try:
            with lent(self._model, self.client.whole.parameters_now(self.client.version)):
                self._copy.to_device()
                yield self._copy.on_device
        finally:
            self._copy.to_device()

    def meet_devices(self) -> None:
        raise AssertionError("with servers there is no predictor")

    def join(self) -> RunState:
        raise AssertionError("whoever is started again takes part at once")

    def ask(self, chapter: Chapter) -> Sequence[Ticket] | Ended:
        """Returns the next samples to compute in this chapter."""
        self.enter(Phase.AWAITING_WORK)
        answer = self.ask_for(self.client, chapter)
        assert not isinstance(answer, Waiting)
        self.enter(Phase.BETWEEN)
        if isinstance(answer, Ended):
            self.refresh()
            return answer
        return [answer]

    def ask_for(self, client: Client, chapter: Chapter, *, at_once: bool = False) -> Ticket | Ended | Waiting:
        """Returns the same for one of several clients of this process; `at_once`: even if there is nothing to do."""
        if self._board is not None and self._board.host_get(HostWord.STOP_REQUESTED):
            client.request_stop()
        return client.ask(chapter, self._call, at_once=at_once)

    def give_back(self) -> None:
        """What has come with the last answer will not be computed, not now."""
        with suppress(PacelineError):  # there may be an error on its way, and this would not be its cause
            self.client.give_back(timeout_s=GIVE_BACK_WITHIN_S)

    def refresh(self) -> None:
        """Has the model hold the parameters as they are now."""
        self.client.pull(sync=self._sync)
        self.client.written.leave()
        self._copy.bring(self.client.pulled)

    def step(self, batches: Sequence[Batch]) -> Closed:
        """Computes a ticket and hands it in; again and with more samples, if one of the others dies meanwhile."""
        (batch,) = batches
        self.client.written.take()
        self.begin(batch.work.assignment)
        self.client.expect(batch.micro_batches)
        worked = work_on(self.client, batch, partial(self._compute, batch), self.enter)
        self.settled(worked)
        self.client.written.leave()
        self._copy.bring(self.client.pulled)  # what the script looks at is what the servers have
        return worked.closed

    def _compute(self, batch: Batch, ticket: Ticket) -> Computed:
        return self._worker.compute(batch, ticket)

    def begin(self, ticket: Ticket) -> None:
        """A ticket is being worked on."""
        self._sync = ticket.sync
        if self._board is not None:
            self._board.begin_step(self._row, ticket.step)

    def settled(self, worked: Worked) -> None:
        """A ticket has been handed in."""
        if self.gradients_ready is not None and self.client.chief and worked.settled.accepted is not None:
            self.gradients_ready()
        self.note(worked)

    def note(self, worked: Worked) -> None:
        """Shows on the board what became of a ticket."""
        outcome, times_ns = worked.settled, (worked.compute_ns, worked.wait_ns, 0)
        if self._board is not None:
            self._board.end_step(self._row, times_ns, outcome.loss, outcome.seen, outcome.step)

    def enter(self, phase: Phase) -> None:
        if self._board is not None:
            self._board.enter(self._row, phase)

    def rest(self) -> None:
        """It works only while it is called."""

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────

    def total(self, key: EvaluationKey, call: ScriptCall, over: Callable[[range], torch.Tensor]) -> torch.Tensor:
        assert call.length is not None
        limit = call_limit()
        self.refresh()
        self.enter(Phase.EVALUATING)
        try:
            values = self.client.task(EvaluationTask(key), call.length, lambda part: over(part).tolist(), call, limit)
        finally:
            self.enter(Phase.BETWEEN)
        return torch.tensor(values, dtype=torch.float64)

    def once(self, number: int, act: Callable[[], None]) -> None:
        self.enter(Phase.SAVING)
        self.client.once(OnceTask(number), act)
        self.enter(Phase.BETWEEN)

    # ── whole tensors ────────────────────────────────────────────────────────────────────────────────────

    def gradients(self) -> dict[str, torch.Tensor]:
        tables = {lookup.name: self.client.whole.table_gradient(lookup.number) for lookup in self.client.tables}
        return tables | self.client.whole.gradients()

    def model_state(self) -> dict[str, torch.Tensor]:
        return self._copy_everything()[0]

    def optimizer_state(self) -> StateByName:
        return self._copy_everything()[1]

    def snapshot(self, state: RunState) -> tuple[dict[str, torch.Tensor], StateByName, RunState]:
        model, optimizer, books = self._copy_everything()
        return model, optimizer, with_books(state, books)

    def _copy_everything(self) -> tuple[dict[str, torch.Tensor], StateByName, Books]:
        """Returns the model's state_dict, the optimizer's state and the chief's books, all after the same step."""
        for _ in range(COPY_TRIES - 1):
            try:
                return self._copy_once()
            except Stalled:
                raise
            except PacelineError:
                continue  # a server was started again: its copy is gone
        return self._copy_once()

    def _copy_once(self) -> tuple[dict[str, torch.Tensor], StateByName, Books]:
        whole = self.client.whole
        copy = whole.freeze()
        parameters, state, books = whole.parameters(copy), whole.state(copy), whole.books(copy)
        buffers = dict(own_state(self._model).named_buffers())
        parameters |= {name: value for name, value in whole.extras(copy).items() if name in buffers}
        for lookup in self.client.tables:
            parameters[lookup.name], held = whole.table(copy, lookup.number)
            if held:
                state[lookup.name] = held
        whole.thaw(copy)
        model = {key: value.detach() for key, value in own_state(self._model).state_dict().items()}
        names = {id(tensor): name for name, tensor in (*own_state(self._model).named_parameters(), *buffers.items())}
        for key, value in own_state(self._model).state_dict(keep_vars=True).items():
            if names.get(id(value)) in parameters:
                model[key] = parameters[names[id(value)]]
        return model, state, books

    def take_state(self, model: dict[str, torch.Tensor], optimizer: StateByName, state: RunState) -> None:
        """Takes over a checkpoint: one replica gives it to the servers."""
        own = own_state(self._model)
        trained = set(self.client.shards.names)
        tables = {lookup.name for lookup in self.client.tables}
        own.load_state_dict({key: value for key, value in model.items() if key not in trained | tables}, strict=False)
        missing = sorted((trained | tables) - set(model))
        if missing:
            raise PacelineError(f"the checkpoint has no {missing[0]!r}: it is of another model")

        def give() -> None:
            values = {name: model[name] for name in trained}
            for lookup in self.client.tables:
                self.client.whole.give_table(lookup.number, model[lookup.name], optimizer.get(lookup.name, {}))
            self.client.restore(values, optimizer, books_of(state))

        self._resumes += 1
        self.client.once(ResumeTask(self._resumes), give)
        self.client.has_resumed(state.step)
        self.client.pull(sync=True)
        self._copy.to_device()

    def kept_by_hosts(self) -> dict[str, torch.Tensor]:
        return {}

    def take_kept_by_hosts(self, saved: dict[str, torch.Tensor]) -> None:
        """Hosts exchange with servers, and not with each other."""

    def close(self) -> None:
        self.client.close()
