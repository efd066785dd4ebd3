"""The course of a run with servers: every replica takes the samples that the chief hands it.

Replicas need not be at the same step, nor make the same number of them. What they do have in common, an epoch's end, an
evaluation, a save, the chief's books tell them: a replica that is started again runs its script from the first line,
and the books answer for everything that lies behind.

The books are the container's, and a container may outlive a run (`--join`). A later run in it is answered in the same
way: epochs that were trained are not trained again, and evaluations at places of the script that lie behind have the
result they had; with more epochs it goes on from there. What a run has *done*, such as a save, it has done for itself:
a later run does it again.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from paceline import checkpoint
from paceline.central.client.client import Client
from paceline.central.replica.books import books_of, notes_of
from paceline.central.replica.engine import CentralizedEngine, LeasedEngine
from paceline.central.wire.protocol import Ended, Ticket
from paceline.data import Ahead, Feed, Ledger
from paceline.data.book import cut
from paceline.errors import DataError, PacelineError
from paceline.loop import training_state
from paceline.loop.course import Training
from paceline.loop.engine import Computed
from paceline.loop.lockstep import step_scheduler
from paceline.loop.passes import Evaluation, MicroBatches, Passes
from paceline.loop.recorder import open_recorder
from paceline.loop.script_position import ScriptPosition
from paceline.rules import Rule
from paceline.run_place import INTERRUPTED
from paceline.seeds import mixed


@dataclasses.dataclass
class Given:
    """What the user has been given and has not trained on yet."""

    given: Any


@dataclasses.dataclass
class Held(Given):
    """A ticket whose batch the user has been given."""

    ticket: Ticket
    ledger: Ledger
    ahead: Ahead
    micro_batches: list[Any]
    changed: bool = False
    following: list[tuple[int, tuple[range, ...]]] = dataclasses.field(default_factory=list)

    def coming(self) -> list[Any]:
        """The batches of what most likely follows, as far as they are loaded."""
        return [batch for request in self.following for batch in self.ahead.peek(*request) if batch is not None]

    def take(self, batch: Any) -> None:
        """The user trains on this."""
        if batch is not self.given:
            self.micro_batches = list(batch) if isinstance(self.given, MicroBatches) else [batch]
            self.changed = True


NOT_YIELDED = "trainer.step was given a batch that trainer.batches did not yield just now"


class Leased:
    """How one replica goes through the data that a chief hands out."""

    _at_once = 1  # how many batches are computed at the same time

    def __init__(self, training: Training) -> None:
        self._model, self._optimizer, self._scheduler = training.model, training.optimizer, training.scheduler
        self._passes, self._place = training.passes, training.place
        self._engine = self._open_engine(training.clip_norm)
        self._recorder = open_recorder(self._place.recording, self._engine, self._model)
        self._position = ScriptPosition()
        self._scheduled = 0  # how many steps the scheduler has been told
        self._held: Given | None = None

    def _open_engine(self, clip_norm: float | None) -> LeasedEngine:
        return CentralizedEngine(self._model, self._optimizer, self._place, clip_norm)

    # ── what can be asked ────────────────────────────────────────────────────────────────────────────────

    @property
    def ledger(self) -> Ledger | None:
        """As the chief's books have it."""
        ledger = self._position.ledger
        if ledger is not None:
            books = self._engine.books()
            chapter = books["chapters"].get(str(self._position.chapter))
            if chapter is not None:
                ledger.settle(books["step"], chapter["counted"])
        return ledger

    @property
    def steps(self) -> int:
        return self._engine.steps

    @property
    def chief(self) -> bool:
        return self._engine.chief

    @property
    def rule(self) -> Rule:
        return self._engine.rule

    @rule.setter
    def rule(self, rule: Rule) -> None:
        self._engine.rule = rule

    @property
    def accepting(self) -> int:
        return self._engine.accepting()

    @property
    def staleness(self) -> dict[int, int]:
        return {int(steps): count for steps, count in self._engine.books()["staleness"].items()}

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────

    def batches(self, feed: Feed, asked: Ledger, epochs: int, prefetch: int) -> Iterator[Any]:
        if feed.length is None:
            raise DataError("dataset", "a stream", "with servers give one that has a length")
        turned = self._position.turn_to(asked, epochs)
        assert turned is not None
        ledger, stop_epoch = turned
        self._engine.expect(_steps_for(ledger, stop_epoch))
        ahead = Ahead(feed, ledger, depth=prefetch * self._at_once)
        try:
            while isinstance(answer := self._next(ledger, stop_epoch, ahead), Given):
                self._held = answer
                yield answer.given
                if self._held is not None:
                    raise PacelineError(
                        "a batch was drawn and never trained on: give every batch to trainer.step, or end the loop"
                    )
            self._ended(answer)
        finally:
            ahead.close()
            if self._engine.client is not None:
                with suppress(PacelineError):  # there may be an error on its way, and this would not be its cause
                    self._engine.client.give_back(timeout_s=5.0)

    def _next(self, ledger: Ledger, stop_epoch: int, ahead: Ahead) -> Given | Ended:
        answer = self._engine.ask(self._position.chapter, ledger, stop_epoch)
        if isinstance(answer, Ended):
            return answer
        (held,) = self._load([answer], ledger, ahead)
        if self._engine.client is not None:
            self._engine.client.expect(held.micro_batches)
        return held

    def _load(self, tickets: Sequence[Ticket], ledger: Ledger, ahead: Ahead) -> list[Held]:
        """The batches of some tickets."""
        self._catch_up(tickets[0].step)
        guesses = [self._guess(ticket, ledger) for ticket in tickets]
        ahead.want([*map(self._request, tickets), *(guess for of_ticket in guesses for guess in of_ticket)])
        found = []
        for ticket, following in zip(tickets, guesses, strict=True):
            micro_batches = ahead.take(*self._request(ticket))
            one = len(micro_batches) == 1 and self._passes.accumulate == 1
            given = micro_batches[0] if one else MicroBatches(micro_batches)
            found.append(Held(given, ticket, ledger, ahead, micro_batches, following=following))
        return found

    def _ended(self, ended: Ended) -> None:
        self._catch_up(ended.step)
        if ended.stop:
            if self._place.save_on_stop:
                self.save(self._place.save_on_stop)
            raise SystemExit(INTERRUPTED)

    def _request(self, ticket: Ticket) -> tuple[int, tuple[range, ...]]:
        runs = [range(start, stop) for start, stop in ticket.runs]
        return ticket.epoch, tuple(run for piece in cut(runs, self._passes.accumulate) for run in piece)

    def _guess(self, ticket: Ticket, ledger: Ledger) -> list[tuple[int, tuple[range, ...]]]:
        """What the next ticket most likely is: as the chief says, or in a sync run the same part of the next batch."""
        if ticket.following is not None:
            epoch, runs = ticket.following
            return [self._request(msgspec.structs.replace(ticket, epoch=epoch, runs=runs))]
        if not ticket.exact or len(ticket.runs) != 1 or ledger.length is None:
            return []
        start, stop = (edge + ledger.batch_size for edge in ticket.runs[0])
        if stop > ledger.length:
            return []
        return [self._request(msgspec.structs.replace(ticket, runs=[(start, stop)]))]

    def _catch_up(self, steps: int) -> None:
        """Step the scheduler as often as the servers have made a step."""
        while self._scheduled < steps:
            step_scheduler(self._optimizer, self._scheduler)
            self._scheduled += 1

    def step(self, batch: Any) -> float:
        held = self._held
        if not isinstance(held, Held):
            raise PacelineError(NOT_YIELDED)
        held.take(batch)
        seed = mixed(held.ledger.seed, held.ticket.step, held.ticket.part)
        compute = self._computing(held, self._passes, self._model, self._engine.client, seed)
        closed = self._engine.step(held.ticket, compute, held.coming)
        self._held = None
        self._catch_up(self._engine.steps)
        if self._recorder is not None:
            self._recorder.step_closed(closed.loss)
        return closed.loss

    def _computing(
        self, held: Held, passes: Passes, model: nn.Module, client: Client | None, seed: int | None
    ) -> Callable[[Ticket], Computed]:
        """Forward and backward of a ticket, on what the user has made of its batch."""

        def around(number: int, is_last: bool) -> AbstractContextManager[None]:
            assert client is not None
            client.begin_pass(held.micro_batches[number], is_last=is_last)
            return nullcontext()

        def compute(ticket: Ticket) -> Computed:
            sizes = self._turn_to(held, ticket)
            whole, number = sum(sizes), held.ticket.step
            loss = passes.run(model, held.micro_batches, sizes, whole=whole, number=number, seed=seed, around=around)
            return Computed(loss, whole)

        return compute

    def _turn_to(self, held: Held, ticket: Ticket) -> list[int]:
        """Have the batch of this ticket, which may be another one after a death; the samples of each pass."""
        if ticket != held.ticket:
            if held.changed:
                raise PacelineError(
                    "a replica died and its samples cannot be computed, because the batch given to trainer.step "
                    "is not the one that trainer.batches yielded: transform it in the dataset or in the loss"
                )
            held.ticket, held.micro_batches = ticket, held.ahead.take(*self._request(ticket))
        _epoch, runs = self._request(held.ticket)
        return [len(run) for run in runs]

    # ── evaluation ───────────────────────────────────────────────────────────────────────────────────────

    def rest(self) -> None:
        """It works only while it is called."""

    def evaluate(self, measure: Evaluation, length: int) -> Any:
        name = self._position.next_evaluation_of_script()
        return measure.mean(self._engine.total(f"evaluation {name}", length, measure.over))

    # ── saving and resuming ──────────────────────────────────────────────────────────────────────────────

    def save(self, path: str | os.PathLike[str], keep: int = 2) -> None:
        def write() -> None:
            model, optimizer, books = self._engine.snapshot()
            tensors, numbers = training_state.flatten(optimizer)
            tensors |= training_state.random_tensors()
            notes = {
                **notes_of(books, self._position),
                **training_state.schedule_and_options(self._optimizer, self._scheduler),
                "configuration": {"replicas": self._place.strategy.replicas, "accumulate": self._passes.accumulate},
                "numbers": numbers,
                "random": training_state.random_notes(),
            }
            checkpoint.write(path, model, tensors, notes, keep=keep)

        self._engine.once(write)

    def resume(self, path: str | os.PathLike[str], fall_back: bool) -> bool:
        if self._position.ledger is not None:
            raise PacelineError(f"trainer.resume({os.fspath(path)!r}) comes too late: call it before trainer.batches")
        if not Path(path).exists():
            return False
        saved = checkpoint.read(path, fall_back=fall_back)
        states = training_state.unflatten(saved.training, saved.notes.get("numbers", {}))
        self._engine.take_state(saved.model, states, books_of(saved.notes))
        training_state.restore_options(self._optimizer, saved.notes["options"])
        training_state.restore_schedule(self._scheduler, saved.notes["scheduler"])
        self._scheduled = saved.notes["step"]
        return True

    def close(self) -> None:
        self._engine.close()


def _steps_for(ledger: Ledger, stop_epoch: int) -> int:
    assert ledger.length is not None
    whole, rest = divmod(ledger.length, ledger.batch_size)
    return stop_epoch * (whole + (1 if rest and not ledger.drop_last else 0))
