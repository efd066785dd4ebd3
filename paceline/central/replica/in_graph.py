"""In-graph replication: one process is all the replicas, a thread each.

Every replica has its own client of the servers, and its own copy of the model: the first one's is the user's. To the
chief they are replicas like any others, so rules and results are those of a process a replica. The user's thread drives
them all:

    batches   takes a ticket for every replica that has nothing to do, loads their batches, gives them to the user
    step      lets these replicas compute and hand in; returns when the step is closed (sync), or when one of them
              has nothing to do again (async)

So a sync run makes one update each time round the user's loop, as in one process. Whoever is late goes on in the
background, and gets a ticket when it is done. Before an evaluation, a save, or a look into the books, the replicas come
to rest.

What belongs to a thread does not reach the replicas if it is set around the loop (autocast, default devices): do that
in the loss. Random numbers are one sequence for all threads, so dropout draws in the order in which they run.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from paceline.central.client.client import Client
from paceline.central.replica.engine import CentralizedEngine
from paceline.central.replica.leased import NOT_YIELDED, Given, Held, Leased
from paceline.central.replica.working import Worked, work_on
from paceline.central.wire.protocol import Ended, Ticket
from paceline.data import Ahead, Ledger
from paceline.errors import PacelineError, Stalled
from paceline.exchange.board import Phase
from paceline.loop.course import Training
from paceline.loop.engine import Computed
from paceline.loop.passes import Evaluation, Passes
from paceline.optim.models import copied
from paceline.rules import Rule

LOOK_AGAIN_S = 0.001  # when the servers are in the middle of something
END_WITHIN_S = 5.0  # for replicas that compute when the process ends


class ReplicaBatches(list[Any]):
    """The batches of several replicas, one after another. `Trainer.step` takes it as a whole."""


@dataclasses.dataclass
class _Hands(Given):
    """Replicas whose batches the user has been given."""

    work: list[tuple[_Replica, Held]]

    def take(self, batch: Any) -> None:
        """The user trains on this."""
        if batch is self.given:
            return
        batches = list(batch) if isinstance(self.given, ReplicaBatches) else [batch]
        if len(batches) != len(self.work):
            raise PacelineError(
                f"trainer.step was given the batches of {len(batches)} replicas instead of {len(self.work)}: give all "
                "that trainer.batches yielded"
            )
        for (_, held), own in zip(self.work, batches, strict=True):
            held.take(own)


class _Replica:
    """One of the replicas: a client, a model, and a thread that computes."""

    def __init__(self, client: Client, passes: Passes) -> None:
        self.client = client
        self.passes = dataclasses.replace(passes, replica=client.replica)
        self.phase = Phase.BETWEEN
        self.is_back = False  # it has handed in, and not been asked for more yet
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return self.phase is not Phase.BETWEEN

    def start(self, job: Callable[[], None], threads: int) -> None:
        """Do this in the replica's thread. It is busy until `phase` says otherwise."""
        self.phase = Phase.COMPUTING
        if self.thread is None:
            name = f"paceline-replica-{self.client.replica}"
            self.thread = threading.Thread(target=self._run, args=(threads,), name=name, daemon=True)
            self.thread.start()
        self.jobs.put(job)

    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)  # of this thread alone
        while (job := self.jobs.get()) is not None:
            job()


class InGraph(Leased):
    """How all replicas of one process go through the data that a chief hands out."""

    _engine: CentralizedEngine

    def __init__(self, training: Training) -> None:
        self._at_once = training.place.strategy.replicas
        self._threads = max(1, torch.get_num_threads() // self._at_once)  # of torch, in each replica
        self._replicas: list[_Replica] = []
        self._changed = threading.Condition()  # guards all below, and the replicas' phases
        self._last: Worked | None = None  # the last that was accepted
        self._failure: BaseException | None = None
        super().__init__(training)

    def _open_engine(self, clip_norm: float | None) -> CentralizedEngine:
        copies = [copied(self._model, self._optimizer, "--in-graph") for _ in range(1, self._at_once)]
        engine = CentralizedEngine(self._model, self._optimizer, self._place, clip_norm)
        self._replicas.append(_Replica(engine.client, self._passes))
        for number, (model, optimizer) in enumerate(copies, 1):
            client = engine.another_client(model, optimizer, number)
            client.options_from = self._optimizer  # that of the user, which schedulers change
            self._replicas.append(_Replica(client, self._passes))
        # A thread that is inside torch when the interpreter goes away aborts the process.
        atexit.register(self._end_threads)
        return engine

    def _guess(self, ticket: Ticket, ledger: Ledger) -> list[tuple[int, tuple[range, ...]]]:
        # In an async run not all replicas are seen at once: what others wait for would be dropped, and loaded twice.
        return super()._guess(ticket, ledger) if ticket.sync else []

    # ── what can be asked ────────────────────────────────────────────────────────────────────────────────

    @property
    def ledger(self) -> Ledger | None:
        self.rest()
        return super().ledger

    @property
    def steps(self) -> int:
        return max(replica.client.step for replica in self._replicas)

    @property
    def rule(self) -> Rule:
        return self._engine.rule

    @rule.setter
    def rule(self, rule: Rule) -> None:
        self.rest()
        self._engine.rule = rule

    @property
    def accepting(self) -> int:
        self.rest()
        return super().accepting

    @property
    def staleness(self) -> dict[int, int]:
        self.rest()
        return super().staleness

    # ── who does what ────────────────────────────────────────────────────────────────────────────────────

    def rest(self) -> None:
        """Return when no replica is at work."""
        self._wait(lambda: not self._any_busy())

    def _any_busy(self) -> bool:
        return any(replica.is_busy for replica in self._replicas)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Wait for the replicas; what one of them raises, is raised here."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or until())
            if self._failure is not None:
                raise self._failure

    def _next(self, ledger: Ledger, stop_epoch: int, ahead: Ahead) -> Given | Ended:
        chapter, limit_s = self._position.chapter, self._place.strategy.timeout_s
        hands: dict[_Replica, Ticket] = {}
        ended: Ended | None = None
        give_up = time.monotonic() + limit_s
        self._engine.enter(Phase.AWAITING_WORK)
        while True:
            busy = [replica for replica in self._replicas if replica.is_busy]
            why, before = "work", len(hands)
            for replica in (r for r in self._replicas if r not in busy and r not in hands):
                replica.is_back = False
                answer = self._engine.ask_for(replica.client, chapter, ledger, stop_epoch, at_once=True)
                if isinstance(answer, Ticket):
                    hands[replica] = answer
                elif isinstance(answer, Ended):
                    ended = answer
                else:
                    why = answer.why
            if hands and len(hands) >= next(iter(hands.values())).needed:
                return self._hand_over(hands, ledger, ahead)
            # A sync step may need more replicas than have a ticket: those that had to wait for one that asked after
            # them, those that are late still. In the end there may be no more.
            if len(hands) > before:
                continue
            if hands and not busy:
                return self._hand_over(hands, ledger, ahead)
            if busy:
                self._wait(lambda busy=busy: not all(replica.is_busy for replica in busy))  # type: ignore[misc]
            elif ended is not None:
                self._engine.refresh()
                if self._last is not None:
                    self._engine.note(self._last)
                self._engine.enter(Phase.BETWEEN)
                return ended
            elif time.monotonic() > give_up:
                raise Stalled(f"all replicas waited {limit_s:g} s for {why}")
            else:
                time.sleep(LOOK_AGAIN_S)

    def _hand_over(self, hands: dict[_Replica, Ticket], ledger: Ledger, ahead: Ahead) -> _Hands:
        self._engine.enter(Phase.BETWEEN)
        ordered = sorted(hands, key=lambda replica: replica.client.replica)
        work = self._load([hands[replica] for replica in ordered], ledger, ahead)
        for replica, held in zip(ordered, work, strict=True):
            replica.client.expect(held.micro_batches)
        given = work[0].given if len(work) == 1 else ReplicaBatches(held.given for held in work)
        return _Hands(given, list(zip(ordered, work, strict=True)))

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────

    def step(self, batch: Any) -> float:
        hands = self._held
        if not isinstance(hands, _Hands):
            raise PacelineError(NOT_YIELDED)
        hands.take(batch)
        first = hands.work[0][1].ticket
        self._engine.begin(first)
        with self._changed:
            for replica, held in hands.work:
                client = replica.client
                compute = self._computing(held, replica.passes, client.model, client, None)
                replica.start(partial(self._work, replica, held, compute), self._threads)
            self._engine.enter(Phase.COMPUTING)
        self._wait(lambda: self._is_over(first))
        self._held = None
        worked = self._last
        assert worked is not None
        if self._recorder is not None:
            self.rest()
        if first.sync and not self._replicas[0].is_busy and self._engine.client.pulled < self.steps:
            self._engine.refresh()  # it had no part in this step
        self._engine.settled(worked)
        self._catch_up(self.steps)
        if self._recorder is not None:
            self._recorder.step_closed(worked.settled.loss)
        return worked.settled.loss

    def _is_over(self, ticket: Ticket) -> bool:
        """Whether the user may go on."""
        if not ticket.sync:
            return any(replica.is_back for replica in self._replicas)
        if any(replica.phase is Phase.AWAITING_SERVERS for replica in self._replicas):
            return False  # it has handed in, and hears in a moment what became of it
        return self.steps > ticket.step or not self._any_busy()

    def _work(self, replica: _Replica, held: Held, compute: Callable[[Ticket], Computed]) -> None:
        """In a replica's thread."""
        try:
            worked = work_on(replica.client, held.ticket, compute, partial(self._enter, replica), held.coming)
        except BaseException as failure:
            with self._changed:
                self._failure = self._failure or failure
                self._changed.notify_all()
            return
        with self._changed:
            settled = worked.settled
            if self._last is None or (settled.accepted is not None and settled.step >= self._last.settled.step):
                self._last = worked
            replica.phase, replica.is_back = Phase.BETWEEN, True
            self._changed.notify_all()

    def _enter(self, replica: _Replica, phase: Phase) -> None:
        with self._changed:
            replica.phase = phase
            if phase is Phase.AWAITING_SERVERS and not any(r.phase is Phase.COMPUTING for r in self._replicas):
                self._engine.enter(phase)

    # ── evaluation, saving, resuming ─────────────────────────────────────────────────────────────────────

    def evaluate(self, measure: Evaluation, length: int) -> Any:
        self.rest()
        return super().evaluate(measure, length)

    def save(self, path: str | os.PathLike[str], keep: int = 2) -> None:
        self.rest()
        super().save(path, keep)

    def resume(self, path: str | os.PathLike[str], fall_back: bool) -> bool:
        resumed = super().resume(path, fall_back)
        for replica in self._replicas:
            replica.client.step = self._engine.client.step
        return resumed

    def close(self) -> None:
        self._end_threads()
        for replica in self._replicas:
            if replica.thread is None or not replica.thread.is_alive():
                replica.client.close()

    def _end_threads(self) -> None:
        atexit.unregister(self._end_threads)
        for replica in self._replicas:
            replica.client.give_up()
            replica.jobs.put(None)
        give_up = time.monotonic() + END_WITHIN_S
        for replica in self._replicas:
            if replica.thread is not None:
                replica.thread.join(max(0.0, give_up - time.monotonic()))
