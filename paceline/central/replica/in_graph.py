"""In-graph replication: one process is all the replicas, a thread each.

Every replica has its own client of the servers, and its own copy of the model: the first one's is the user's. To the
chief they are replicas like any others, so rules and results are those of a process a replica. The user's thread drives
them all:

    ask     takes a ticket for every replica that has nothing to do
    step    lets these replicas compute and hand in; returns when the step is closed (sync), or when one of them has
            nothing to do again (async)

So a sync run makes one update each time round the user's loop, as in one process. Whoever is late goes on in the
background, and gets a ticket when it is done. Before an evaluation, a save, or a look into the books, the replicas come
to rest.

Parameters are on servers; without any, one that is a thread of this process has them (`own_server`). Models of the
replicas may be on devices of their own, of which each has the next.

What belongs to a thread does not reach the replicas if it is set around the loop (autocast, default devices): do that
in the loss. Random numbers are one sequence for all threads, so dropout draws in the order in which they run.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.central.client.client import Client
from paceline.central.client.server_view import ServerAddresses
from paceline.central.messages.replies import Ended, Ticket
from paceline.central.replica.engine import CentralizedEngine
from paceline.central.replica.own_server import OwnServer
from paceline.central.replica.working import ClientWorker, Worked, work_on
from paceline.errors import Stalled
from paceline.exchange.words import Phase
from paceline.loop.engine import Batch, Chapter, Closed
from paceline.loop.run_state import RunState, StateByName
from paceline.loop.script_position import ScriptPosition
from paceline.optim.host_copy import SameModel
from paceline.optim.models import copied
from paceline.run_place import Place
from paceline.strategy import Centralized

LOOK_AGAIN_S = 0.001  # when the servers are in the middle of something
END_WITHIN_S = 5.0  # for replicas that compute when the process ends


class _ReplicaThread:
    """One of the replicas: a client, a model, and a thread that computes."""

    def __init__(self, client: Client, copy: SameModel) -> None:
        self.client = client
        self.worker = ClientWorker(client, copy)
        self.phase = Phase.BETWEEN
        self.is_back = False  # it has handed in, and not been asked for more yet
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        return self.phase is not Phase.BETWEEN

    def start(self, job: Callable[[], None], threads: int) -> None:
        """Does this in the replica's thread. It is busy until `phase` says otherwise."""
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


class InGraphEngine(CentralizedEngine):
    """All replicas of a run, in one process."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        place: Place,
        strategy: Centralized,
        clip_norm: float | None,
        copy: type[SameModel] = SameModel,
    ) -> None:
        self.at_once = strategy.replicas
        self._timeout_s = strategy.timeout_s
        self._threads = max(1, torch.get_num_threads() // self.at_once)  # of torch, in each replica
        self._changed = threading.Condition()  # guards all below, and the replicas' phases
        self._last: Worked | None = None  # the last that was accepted
        self._failure: BaseException | None = None
        self._replicas: list[_ReplicaThread] = []
        others = range(1, self.at_once)
        devices = [torch.device(place.accelerator_of(number)) if copy.is_elsewhere else None for number in others]
        copies = [copied(model, optimizer, "--in-graph", to=device) for device in devices]
        self._own_server = OwnServer() if place.servers is None else None
        super().__init__(model, optimizer, place, strategy, clip_norm, copy)
        self.client.written.scripts = 1
        self._replicas.append(_ReplicaThread(self.client, self._copy))
        for number, (own_model, own_optimizer) in enumerate(copies, 1):
            own = copy(own_model, own_optimizer)
            self._replicas.append(_ReplicaThread(self.open_client(own, optimizer, number), own))
        self._handed: list[_ReplicaThread] = []  # those who got the tickets in hand
        # A thread that is inside torch when the interpreter goes away aborts the process.
        atexit.register(self._end_threads)

    def _find_servers(self, place: Place, number: int) -> ServerAddresses:
        return self._own_server.addresses if self._own_server is not None else super()._find_servers(place, number)

    @property
    def _step(self) -> int:
        """Steps closed so far, as far as any replica knows."""
        return max(replica.client.step for replica in self._replicas)

    def steps(self, position: ScriptPosition) -> int:
        return self._step

    # ── who does what ────────────────────────────────────────────────────────────────────────────────────

    def rest(self) -> None:
        """Returns when no replica is at work."""
        self._wait(lambda: not self._any_busy())

    def _any_busy(self) -> bool:
        return any(replica.is_busy for replica in self._replicas)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Waits for the replicas; what one of them raises, is raised here."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or until())
            if self._failure is not None:
                raise self._failure

    def ask(self, chapter: Chapter) -> Sequence[Ticket] | Ended:
        """Returns a ticket for every replica that has nothing to do, as soon as there are enough for a step."""
        hands: dict[_ReplicaThread, Ticket] = {}
        ended: Ended | None = None
        give_up = time.monotonic() + self._timeout_s
        self.enter(Phase.AWAITING_WORK)
        while True:
            busy = [replica for replica in self._replicas if replica.is_busy]
            why, before = "work", len(hands)
            for replica in (r for r in self._replicas if r not in busy and r not in hands):
                replica.is_back = False
                answer = self.ask_for(replica.client, chapter, at_once=True)
                if isinstance(answer, Ticket):
                    hands[replica] = answer
                elif isinstance(answer, Ended):
                    ended = answer
                else:
                    why = answer.why
            if hands and len(hands) >= next(iter(hands.values())).needed:
                return self._hand_over(hands)
            # A sync step may need more replicas than have a ticket: those that had to wait for one that asked after
            # them, those that are late still. In the end there may be no more.
            if len(hands) > before:
                continue
            if hands and not busy:
                return self._hand_over(hands)
            if busy:
                self._wait(lambda busy=busy: not all(replica.is_busy for replica in busy))  # type: ignore[misc]
            elif ended is not None:
                self.refresh()
                if self._last is not None:
                    self.note(self._last)
                self.enter(Phase.BETWEEN)
                return ended
            elif time.monotonic() > give_up:
                raise Stalled(f"all replicas waited {self._timeout_s:g} s for {why}")
            else:
                time.sleep(LOOK_AGAIN_S)

    def _hand_over(self, hands: dict[_ReplicaThread, Ticket]) -> Sequence[Ticket]:
        self.enter(Phase.BETWEEN)
        self._handed = sorted(hands, key=lambda replica: replica.client.replica)
        return [hands[replica] for replica in self._handed]

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────

    def step(self, batches: Sequence[Batch]) -> Closed:
        first: Ticket = batches[0].work.assignment
        self.client.written.take()
        self.begin(first)
        for replica, batch in zip(self._handed, batches, strict=True):
            replica.client.expect(batch.micro_batches)
            _same_modes(self._copy.on_device, replica.worker.model)
        with self._changed:
            for replica, batch in zip(self._handed, batches, strict=True):
                replica.start(partial(self._work, replica, batch), self._threads)
            self.enter(Phase.COMPUTING)
        self._wait(lambda: self._is_over(first))
        worked = self._last
        assert worked is not None
        if self.gradients_ready is not None:
            self.rest()
        if first.sync and not self._replicas[0].is_busy and self.client.pulled < worked.settled.version:
            self.refresh()  # it had no part in this step
        self.settled(worked)
        if not self._replicas[0].is_busy:  # else its thread may pull while the script goes on
            self.client.written.leave()
            self._copy.bring(self.client.pulled)
        return worked.closed

    def _is_over(self, ticket: Ticket) -> bool:
        """Whether the user may go on."""
        if not ticket.sync:
            return any(replica.is_back for replica in self._replicas)
        if any(replica.phase is Phase.AWAITING_SERVERS for replica in self._replicas):
            return False  # it has handed in, and hears in a moment what became of it
        return self._step > ticket.step or not self._any_busy()

    def _work(self, replica: _ReplicaThread, batch: Batch) -> None:
        """In a replica's thread."""
        try:
            compute = partial(replica.worker.compute, batch)
            worked = work_on(replica.client, batch, compute, partial(self._enter, replica))
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

    def _enter(self, replica: _ReplicaThread, phase: Phase) -> None:
        with self._changed:
            replica.phase = phase
            if phase is Phase.AWAITING_SERVERS and not any(r.phase is Phase.COMPUTING for r in self._replicas):
                self.enter(phase)

    # ── resuming, ending ─────────────────────────────────────────────────────────────────────────────────

    def take_state(self, model: dict[str, torch.Tensor], optimizer: StateByName, state: RunState) -> None:
        super().take_state(model, optimizer, state)
        for replica in self._replicas:
            replica.client.has_resumed(self.client.step)

    def close(self) -> None:
        self._end_threads()
        for replica in self._replicas:
            if replica.thread is None or not replica.thread.is_alive():
                replica.client.close()
        if self._own_server is not None:
            self._own_server.close()

    def _end_threads(self) -> None:
        atexit.unregister(self._end_threads)
        for replica in self._replicas:
            replica.client.give_up()
            replica.jobs.put(None)
        give_up = time.monotonic() + END_WITHIN_S
        for replica in self._replicas:
            if replica.thread is not None:
                replica.thread.join(max(0.0, give_up - time.monotonic()))


def _same_modes(users: nn.Module, own: nn.Module) -> None:
    """What the user has frozen (`.eval()`, `.requires_grad_(False)`) is frozen in every replica."""
    for theirs, mine in zip(users.modules(), own.modules(), strict=True):
        mine.training = theirs.training
    for given, taken in zip(users.parameters(), own.parameters(), strict=True):
        taken.requires_grad_(given.requires_grad)
