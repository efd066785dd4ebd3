"""One server's share of a container: parameters, tables, and the gradients that wait to be used.

All servers follow the chief's closes one by one (`step_maker` makes them here), so after the same number of steps they
hold parts of the same parameters. What happens is noted in the journal before it is acknowledged.

Each replica has a *place* here, a number, for its gradients. Several runs may train one container at a time: its chief
gives each a row of places, and tells the other servers when they are free again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from paceline.central.chief.books import Books
from paceline.central.chief.tickets import Close
from paceline.central.container.bounds import check_options
from paceline.central.container.journal import Journal
from paceline.central.container.step_maker import States, StepMaker
from paceline.central.messages.records import Made, PulledCopy, Pushed, RowsPut, packed
from paceline.central.messages.settings import Settings
from paceline.central.shards import Option, Shards, Spec
from paceline.central.tables.tables import Rows, Table, TableCopy
from paceline.errors import PacelineError
from paceline.memory.server_arena import ServerArena

MOST_FROZEN = 4  # copies that are being read at a time

Tensors = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class FrozenCopy:
    """A copy of everything after some step, to be read while training goes on."""

    number: int
    step: int
    parameters: torch.Tensor
    state: States
    tables: list[TableCopy]
    extras: Tensors = ()  # on the chief: the model's buffers, and the parameters that are not trained
    books: Books | None = None  # on the chief


class Pusher(Protocol):
    """A connection over which a replica leaves its gradients."""

    def supersede(self) -> None:
        """The replica has another connection now."""


class Container:
    """Holds the parameters of one name on one server."""

    def __init__(self, name: str, spec: Spec, server: int, settings: Settings) -> None:
        self.name = name
        self.spec = spec
        self.server = server
        self.settings = settings
        self.shards = Shards(spec)
        self.layout = self.shards.layouts[server]
        self.arena = ServerArena.create(self.layout, settings.replicas)
        self.filled = False
        self.reopened = False  # an earlier run has left what is here
        self.lock = threading.RLock()  # held while parameters are written, or read as a whole
        self._known_runs = {settings.run}
        # Replicas are known by their places, here and below.
        self.not_pulled: set[int] = set()  # those of which it is not known what they computed on
        self.maker = StepMaker(spec, self.arena, self.not_pulled, recording=settings.recording)
        of = spec.optimizer
        self.tables = [Table(table, of.name, of.groups[table.group], server, spec.servers) for table in spec.tables]
        self.rows: dict[int, list[Rows]] = {}  # its gradients for the tables
        self.staged: dict[int, int] = {}  # the ticket whose gradient is here
        self._staged_by: dict[int, int] = {}  # the incarnation that it came from
        self.used: dict[int, int] = {}  # the last ticket that went into a step
        self.incarnations: dict[int, int] = {}  # the newest of each
        self._pushers: WeakValueDictionary[int, Pusher] = WeakValueDictionary()  # the newest connection of each
        self.addresses: list[str] = []  # of all servers
        self.journal = Journal()  # where everything is noted before it is acknowledged
        self._frozen: dict[int, FrozenCopy] = {}

    @property
    def step(self) -> int:
        return self.arena.version

    @property
    def bytes(self) -> int:
        return self.layout.bytes

    def reopen(self, spec: Spec, settings: Settings) -> bool:
        """Let another run train what is here: it may have other options of the optimizer. Return whether it is new."""
        with self.lock:
            if settings.run in self._known_runs:
                return False
            self._known_runs.add(settings.run)
            if (spec, settings.recording) != (self.spec, self.settings.recording):
                state = self.maker.state()
                self.spec, self.shards = spec, Shards(spec)
                self.layout = self.arena.layout = self.shards.layouts[self.server]
                self.maker = StepMaker(spec, self.arena, self.not_pulled, recording=settings.recording)
                self.maker.take_state(state)
            self.settings = settings
            self.reopened = self.filled
            return True

    def vacate(self, places: Iterable[int]) -> None:
        """Nobody is in these places any more: whoever comes from there is not listened to."""
        with self.lock:
            left = [pusher for place in places if (pusher := self._pushers.pop(place, None)) is not None]
            for place in places:
                for held in (self.staged, self._staged_by, self.used, self.rows, self.incarnations):
                    held.pop(place, None)
                self.not_pulled.discard(place)
                self.arena.remove_place(place)
        for pusher in left:
            pusher.supersede()

    def take_over(self, copy: FrozenCopy) -> None:
        """Begin with what another container was."""
        with self.lock:
            for table, held in zip(self.tables, copy.tables, strict=True):
                table.weight.copy_(held.weight)
                table.state = {key: value.clone() for key, value in held.state.items()}
                table.steps = held.steps
            self.restore(copy.parameters, copy.state, copy.step)

    def close(self) -> None:
        """Give the memory back."""
        with self.lock:
            self._frozen.clear()
            self.arena.close()
            for table in self.tables:
                table.arena.close()

    # ── gradients ────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, replica: int, incarnation: int) -> None:
        """A process takes that place: older ones are not listened to any more."""
        self.arena.make_place(replica)
        self.incarnations[replica] = max(incarnation, self.incarnations.get(replica, 0))

    def connect(self, replica: int, incarnation: int, by: Pusher, *, shared: bool) -> None:
        """A process that takes the place of `replica` pushes over this connection from now on, and over no other."""
        with self.lock:
            self._check_incarnation(replica, incarnation)
            self.admit(replica, incarnation)
            before, self._pushers[replica] = self._pushers.get(replica), by
            if shared:
                self.arena.share_gradient(replica)
        if before is not None and before is not by:
            before.supersede()

    def check_place(self, replica: int) -> None:
        if replica not in self.arena.places:
            raise PacelineError(f"place {replica} of container {self.name!r} is nobody's: open it first")

    def _check_close(self, close: Close) -> None:
        """A step, as a chief has it made."""
        if not close.accepted:
            raise PacelineError(f"step {close.step} has no gradient")
        for accepted in close.accepted:
            self.check_place(accepted.replica)

    def _check_incarnation(self, replica: int, incarnation: int) -> None:
        if incarnation < self.incarnations.get(replica, 0):
            raise PacelineError(f"replica {replica} was started again since: this process no longer takes part")

    def check_push(self, replica: int, incarnation: int, ticket: int, by: Pusher) -> None:
        """Refuse the gradient of a process, or a connection, that another has followed, and one that is over."""
        self.check_place(replica)
        self._check_incarnation(replica, incarnation)
        if self._pushers.get(replica) is not by:
            raise PacelineError(f"replica {replica} has another connection to server {self.server}: push there")
        # One that was started again may begin further back: mirrored replicas count from what was saved last.
        if incarnation == self._staged_by.get(replica) and ticket < (held := self.staged[replica]):
            raise PacelineError(f"the gradient of ticket {ticket} comes too late: that of {held} is here")

    def push(self, pushed: Pushed, received: torch.Tensor | None, rows: list[Rows], by: Pusher) -> torch.Tensor | None:
        """Take a gradient that was `received` as a whole, and return memory for the next one.

        None: it lies in its replica's place, as does what it was computed on.
        """
        replica, journal = pushed.replica, self.journal
        gradient = self.arena.gradients[replica] if received is None else received
        parts: Sequence[memoryview] = ()
        if journal.keeps:
            of_tables = [part for given in rows for part in given.tensors]
            parts = journal.seal(pushed, packed([gradient, *of_tables]))
        # No step is being made of what was there before, and a snapshot has it, or what is written after that.
        with self.lock, journal.lock:
            self.check_push(replica, pushed.incarnation, pushed.ticket, by)
            self.take_push(pushed, rows)
            if received is not None:
                received = self.arena.replace_gradient(replica, received)
            else:
                self.not_pulled.discard(replica)
            written = journal.write(pushed, parts)
        journal.flush(written)
        return received

    def take_push(self, pushed: Pushed, rows: list[Rows]) -> None:
        """Take the gradient of a ticket, which lies in the replica's place, and its gradients for every table."""
        self.maker.check_slots(pushed.untouched)
        for table, given in zip(self.tables, rows, strict=True) if rows else ():
            table.check_rows(given.ids)
        touched = self.arena.touched[pushed.replica]
        touched.fill_(1)
        for slot in pushed.untouched:
            touched[slot] = 0
        self.staged[pushed.replica], self._staged_by[pushed.replica] = pushed.ticket, pushed.incarnation
        if rows:
            self.rows[pushed.replica] = rows

    def _rows_of(self, close: Close, number: int) -> list[tuple[Rows, float]]:
        return [
            (self.rows[accepted.replica][number], accepted.weight)
            for accepted in close.accepted
            if accepted.replica in self.rows
        ]

    def check_staged(self, close: Close) -> None:
        """Refuse a step whose gradients are not here; without a journal those in shared memory are not announced."""
        for accepted in close.accepted:
            staged = self.staged.get(accepted.replica)
            if staged != accepted.ticket and (staged is not None or self.journal.keeps):
                raise PacelineError(
                    f"the gradient of replica {accepted.replica} for step {close.step} is not on server {self.server}"
                )

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────

    def squared_norm(self, close: Close) -> float:
        """Return the squared length of the step's gradient, as far as it lies here."""
        with self.lock:
            self._check_close(close)
            total = self.maker.squared_norm(close)
            for number, table in enumerate(self.tables):
                if given := self._rows_of(close, number):
                    total += float(torch.linalg.vector_norm(table.summed(given).values, dtype=torch.float64)) ** 2
            return total

    def apply(
        self, close: Close, options: Sequence[Mapping[str, Option]], scale: float = 1.0, *, noted: bool = False
    ) -> None:
        """Make the step. One that was made before is not made again. `noted`: it is in the journal already."""
        check_options(options, self.spec.optimizer.groups)
        with self.lock:
            if close.step == self.step:
                self._check_close(close)
                self.check_staged(close)
                if not noted:
                    self.note(Made(close=close, options=[dict(given) for given in options], scale=scale))
                self._make(close, options, scale)
            elif close.step > self.step:
                raise PacelineError(f"server {self.server} is at step {self.step} and cannot make step {close.step}")
            elif self.journal.keeps and not self._was_last(close):
                raise PacelineError(
                    f"server {self.server} has made {self.step} steps and is told to make step {close.step} once more, "
                    "which was another: the chief's log has lost what came after it; go on from a checkpoint"
                )
        if not noted:
            self.journal.flush()  # also if it was made before: whoever asked then may not have been answered

    def _was_last(self, close: Close) -> bool:
        used = all(self.used.get(accepted.replica) == accepted.ticket for accepted in close.accepted)
        return used and close.step == self.step - 1

    def _make(self, close: Close, options: Sequence[Mapping[str, Option]], scale: float) -> None:
        self.maker.update(close, options, scale)
        for number, table in enumerate(self.tables):
            if given := self._rows_of(close, number):
                table.update(given, self.maker.groups[table.spec.group], scale)
        self.arena.version = close.step + 1
        self.used.update((accepted.replica, accepted.ticket) for accepted in close.accepted)
        self.journal.made()

    def note(self, made: Made, body: Sequence[memoryview] = ()) -> None:
        """Write a step to the journal: the gradients that make it are there by then. Somebody has to `flush` it."""
        journal = self.journal
        with journal.lock:
            for accepted in made.close.accepted:
                if self.maker.corrects(accepted, made.close.compensation):
                    pulled = PulledCopy(replica=accepted.replica)
                    journal.write(pulled, journal.seal(pulled, packed([self.arena.pulled[accepted.replica]])))
            journal.write(made, journal.seal(made, body))

    # ── parameters out ───────────────────────────────────────────────────────────────────────────────────

    def pull(self, replica: int) -> tuple[int, torch.Tensor]:
        """Return the step and the parameters after it, copied to where they are remembered as this replica's."""
        with self.lock:
            self.check_place(replica)
            place = self.arena.pulled[replica]
            place.copy_(self.arena.parameters)
            self.not_pulled.discard(replica)
            return self.step, place

    def look(self, known: int | None) -> tuple[int, torch.Tensor | None]:
        """Return the step and a copy of the parameters after it, unless they are those after `known` steps. Nobody
        trains on them, so nothing is remembered."""
        with self.lock:
            return self.step, None if self.step == known else self.arena.parameters.clone()

    def forget_pulled(self) -> None:
        """Correct nothing by what replicas have pulled until they pull again: that went with the process."""
        self.not_pulled.update(self.arena.places)

    def freeze(self, number: int, extras: Tensors = (), books: Books | None = None) -> FrozenCopy:
        """Keep a copy of everything under that number, and return it."""
        with self.lock:
            while len(self._frozen) >= MOST_FROZEN:  # somebody has not said that it is done
                del self._frozen[min(self._frozen)]
            self._frozen[number] = self.copy(number, extras, books)
            return self._frozen[number]

    def copy(self, number: int = 0, extras: Tensors = (), books: Books | None = None) -> FrozenCopy:
        with self.lock:
            return FrozenCopy(
                number,
                self.step,
                self.arena.parameters.clone(),
                self.maker.state(),
                [table.copy() for table in self.tables],
                [(name, tensor.clone()) for name, tensor in extras],
                books,
            )

    def frozen(self, number: int) -> FrozenCopy:
        copy = self._frozen.get(number)
        if copy is None:
            raise PacelineError(f"copy {number} of container {self.name!r} is gone: make another")
        return copy

    def thaw(self, number: int) -> None:
        with self.lock:
            self._frozen.pop(number, None)

    def sums(self) -> tuple[torch.Tensor, list[int]]:
        """Return the gradient of the last step (while recording), and the slots that have one."""
        with self.lock:
            return self.maker.sums()

    # ── values in ────────────────────────────────────────────────────────────────────────────────────────

    def fill(self, step: int = 0) -> None:
        """The parameters have been written into the arena."""
        with self.lock:
            self.arena.version = step
            self.filled = True

    def restore(self, parameters: torch.Tensor, states: States, step: int) -> None:
        """Begin with these parameters and this optimizer state, after so many steps."""
        with self.lock:
            self.arena.parameters.copy_(parameters)
            self.maker.take_state(states)
            self.fill(step)

    def put_rows(self, put: RowsPut, values: torch.Tensor) -> None:
        """Take values for some rows of a table, or of its optimizer's state."""
        table, journal = self.tables[put.table], self.journal
        with self.lock, journal.lock:
            if len(values):
                table.put(put.key, put.start, values)
            if put.steps is not None:
                table.steps = put.steps
            journal.write(put, journal.seal(put, packed([values])))
        journal.flush()
