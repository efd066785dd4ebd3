"""The engine of a replica whose parameters live on servers.

It does not divide batches with the other replicas: the chief hands it tickets, and decides which of them make a step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.central.client.client import Client
from paceline.central.client.server_view import ServerAddresses
from paceline.central.replica.working import Worked, work_on
from paceline.central.wire.protocol import RESUME, Ended, Settings, Ticket, Waiting
from paceline.data.ledger import Ledger
from paceline.errors import PacelineError, Stalled
from paceline.exchange.board import Board, HostWord, Phase, Word
from paceline.loop.engine import Closed, Computed, StateByName
from paceline.net.secure import Keys, read_token
from paceline.optim.models import own_state
from paceline.rules import Rule
from paceline.run_place import Place
from paceline.strategy import Centralized

COPY_TRIES = 4  # for a copy of everything, while servers are killed


class LeasedEngine(Protocol):
    """What a replica's course needs of whoever turns to the servers for it."""

    gradients_ready: Callable[[], None] | None
    rule: Rule

    @property
    def client(self) -> Client | None:
        """Of the servers; None if another device of the replica is the one."""

    @property
    def chief(self) -> bool: ...

    @property
    def steps(self) -> int: ...

    def expect(self, steps: int) -> None: ...

    def ask(self, chapter: int, ledger: Ledger, stop_epoch: int) -> Ticket | Ended: ...

    def step(
        self, ticket: Ticket, compute: Callable[[Ticket], Computed], coming: Callable[[], Sequence[Any]]
    ) -> Closed: ...

    def total(self, name: str, length: int, work: Callable[[range], torch.Tensor]) -> torch.Tensor: ...

    def once(self, act: Callable[[], None]) -> None: ...

    def accepting(self) -> int: ...

    def books(self) -> dict[str, Any]: ...

    def gradients(self) -> dict[str, torch.Tensor]: ...

    def model_state(self) -> dict[str, torch.Tensor]: ...

    def optimizer_state(self) -> StateByName: ...

    def snapshot(self) -> tuple[dict[str, torch.Tensor], StateByName, dict[str, Any]]: ...

    def take_state(self, model: dict[str, torch.Tensor], optimizer: StateByName, books: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def servers_of(place: Place, number: int) -> ServerAddresses:
    """Where the parameters of the `number`-th trainer of this script are: a second one is another training."""
    assert place.servers is not None
    return ServerAddresses(
        place.servers.addresses,
        place.servers.container if number == 1 else f"{place.servers.container}-{number}",
        read_token(Path(place.servers.token_folder)) if place.servers.token_folder is not None else "",
        Keys.load(Path(place.servers.keys)) if place.servers.keys is not None else None,
    )


class CentralizedEngine:
    """One replica among several, with servers that own the parameters."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, place: Place, clip_norm: float | None) -> None:
        strategy = place.strategy
        assert isinstance(strategy, Centralized)
        assert place.servers is not None
        self._model = model
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
            servers=servers_of(place, number),
            settings=Settings(
                replicas=strategy.replicas,
                rule=strategy.rule,
                warmup_steps=strategy.warmup_steps,
                warmup_epochs=strategy.warmup_epochs,
                clip_norm=clip_norm,
                durability=strategy.durability,
                recording=place.recording is not None,
                run=place.servers.run,
                timeout_s=strategy.timeout_s,
            ),
            incarnation=incarnation,
            wire_name=strategy.wire,
            share_memory=strategy.exchange != "tcp",
        )
        self.client = self._open(model, optimizer, replica=place.rank // strategy.devices)
        if self._board is not None and not self._board.alive(self._row):
            self._board.set(self._row, Word.ADMITTED, incarnation)  # one that was started again takes part at once
        self.gradients_ready: Callable[[], None] | None = None
        self._rule: Rule = strategy.rule
        self._tasks = self._resumes = 0
        self._sync = True
        self.enter(Phase.BETWEEN)

    # ── what can be asked ────────────────────────────────────────────────────────────────────────────────

    @property
    def chief(self) -> bool:
        return self.client.chief

    @property
    def steps(self) -> int:
        return self.client.step

    @property
    def rule(self) -> Rule:
        return self._rule

    @rule.setter
    def rule(self, rule: Rule) -> None:
        if rule != self._rule:
            self._rule = rule
            self.client.set_rule(rule)

    def accepting(self) -> int:
        return self.client.accepting()

    def expect(self, steps: int) -> None:
        if self._board is not None:
            self._board.host_set(HostWord.TOTAL_STEPS, steps)

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, chapter: int, ledger: Ledger, stop_epoch: int) -> Ticket | Ended:
        """The next samples to compute in this chapter."""
        self.enter(Phase.AWAITING_WORK)
        answer = self.ask_for(self.client, chapter, ledger, stop_epoch)
        assert not isinstance(answer, Waiting)
        self.enter(Phase.BETWEEN)
        if isinstance(answer, Ended):
            self.refresh()
        return answer

    def ask_for(
        self, client: Client, chapter: int, ledger: Ledger, stop_epoch: int, *, at_once: bool = False
    ) -> Ticket | Ended | Waiting:
        """The same for one of several clients of this process; `at_once`: also if there is nothing to do yet."""
        assert ledger.length is not None
        if self._board is not None and self._board.host_get(HostWord.STOP_REQUESTED):
            client.request_stop()
        return client.ask(
            chapter=chapter,
            length=ledger.length,
            batch_size=ledger.batch_size,
            left_out=ledger.length % ledger.batch_size if ledger.drop_last else 0,
            stop_epoch=stop_epoch,
            at_once=at_once,
        )

    def refresh(self) -> None:
        """Have the model hold the parameters as they are now."""
        self.client.pull(sync=self._sync)

    def another_client(self, model: nn.Module, optimizer: Optimizer, replica: int) -> Client:
        """One more replica in this process."""
        return self._open(model, optimizer, replica=replica)

    def step(
        self, ticket: Ticket, compute: Callable[[Ticket], Computed], coming: Callable[[], Sequence[Any]]
    ) -> Closed:
        """Compute a ticket and hand it in; again and with more samples, if one of the others dies meanwhile."""
        self.begin(ticket)
        worked = work_on(self.client, ticket, compute, self.enter, coming)
        self.settled(worked)
        return Closed(worked.settled.loss, worked.settled.samples, worked.settled.replicas)

    def begin(self, ticket: Ticket) -> None:
        """A ticket is being worked on."""
        self._sync = ticket.sync
        if self._board is not None:
            self._board.set(self._row, Word.STEP, ticket.step)

    def settled(self, worked: Worked) -> None:
        """A ticket has been handed in."""
        if self.gradients_ready is not None and self.client.chief and worked.settled.accepted is not None:
            self.gradients_ready()
        self.note(worked)

    def note(self, worked: Worked) -> None:
        """Show on the board what became of a ticket."""
        board, row, settled = self._board, self._row, worked.settled
        if board is None:
            return
        board.set(row, Word.COMPUTE_NS, worked.compute_ns)
        board.set(row, Word.WAIT_NS, worked.wait_ns)
        board.set(row, Word.UPDATE_NS, 0)
        board.set_float(row, Word.MEAN_LOSS, settled.loss)
        board.set(row, Word.STEP, settled.step)
        board.set(row, Word.SAMPLES_SEEN, settled.seen)
        board.enter(row, Phase.BETWEEN)

    def enter(self, phase: Phase) -> None:
        if self._board is not None:
            self._board.enter(self._row, phase)

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────

    def total(self, name: str, length: int, work: Callable[[range], torch.Tensor]) -> torch.Tensor:
        """The sum over all samples of what `work` returns for some of them, whoever computes which."""
        self.refresh()
        self.enter(Phase.EVALUATING)
        values = self.client.task(name, length, lambda part: work(part).tolist())
        self.enter(Phase.BETWEEN)
        return torch.tensor(values, dtype=torch.float64)

    def once(self, act: Callable[[], None]) -> None:
        self._tasks += 1
        self.enter(Phase.SAVING)
        self.client.once(f"once {self._tasks}", act)
        self.enter(Phase.BETWEEN)

    # ── whole tensors ────────────────────────────────────────────────────────────────────────────────────

    def gradients(self) -> dict[str, torch.Tensor]:
        tables = {lookup.name: self.client.whole.table_gradient(lookup.number) for lookup in self.client.tables}
        return tables | self.client.whole.gradients()

    def model_state(self) -> dict[str, torch.Tensor]:
        return self.snapshot()[0]

    def optimizer_state(self) -> StateByName:
        return self.snapshot()[1]

    def snapshot(self) -> tuple[dict[str, torch.Tensor], StateByName, dict[str, Any]]:
        """The model's state_dict, the optimizer's state and the chief's books, all after the same step."""
        for _ in range(COPY_TRIES - 1):
            try:
                return self._snapshot()
            except Stalled:
                raise
            except PacelineError:
                continue  # a server was started again: its copy is gone
        return self._snapshot()

    def _snapshot(self) -> tuple[dict[str, torch.Tensor], StateByName, dict[str, Any]]:
        copy = self.client.whole.freeze()
        parameters, state = self.client.whole.parameters(copy), self.client.whole.state(copy)
        books = self.client.whole.books(copy)
        for lookup in self.client.tables:
            parameters[lookup.name], held = self.client.whole.table(copy, lookup.number)
            if held:
                state[lookup.name] = held
        self.client.whole.thaw(copy)
        model = {key: value.detach() for key, value in own_state(self._model).state_dict().items()}
        names = {id(parameter): name for name, parameter in own_state(self._model).named_parameters()}
        for key, value in own_state(self._model).state_dict(keep_vars=True).items():
            if names.get(id(value)) in parameters:
                model[key] = parameters[names[id(value)]]
        return model, state, books

    def take_state(self, model: dict[str, torch.Tensor], optimizer: StateByName, books: dict[str, Any]) -> None:
        """Take over a checkpoint: one replica gives it to the servers."""
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
            self.client.restore(values, optimizer, books["step"], json.dumps(books).encode())

        self._resumes += 1
        self.client.once(f"{RESUME}{self._resumes}", give)
        self.client.step = books["step"]
        self.client.pull(sync=True)

    def books(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.client.notes())
        return found

    def close(self) -> None:
        self.client.close()
