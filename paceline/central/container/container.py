"""One server's share of a container: parameters, their optimizer, and the gradients that wait to be used.

A step is made chunk by chunk, two megabytes that stay in the cache: the accepted gradients are added up in the order of
the close, corrected for staleness if the rule says so, and the optimizer updates the chunk in place. All servers follow
the chief's closes one by one, so after the same number of steps they hold parts of the same parameters.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from paceline.central.chief.books import Books
from paceline.central.chief.tickets import Accepted, Close
from paceline.central.container.bounds import check_close, check_options, check_place
from paceline.central.durability.journal import Journal
from paceline.central.durability.peer_journal import PeerJournal
from paceline.central.jobs import together
from paceline.central.shards import Option, Shards, Spec, make_optimizer, restored_options
from paceline.central.tables.tables import Rows, Table, TableCopy
from paceline.central.wire.records import Made, PulledCopy, Pushed, RowsPut, packed
from paceline.central.wire.settings import Settings
from paceline.errors import PacelineError
from paceline.memory.layout import Chunk, FlatLayout
from paceline.memory.server_arena import ServerArena
from paceline.optim.shard_optimizer import ShardOptimizer
from paceline.optim.state import StateLayout

HANDS = 2  # threads that make a sync step; one core alone does not use all of the memory's bandwidth
MOST_FROZEN = 4  # copies that are being read at a time

States = dict[int, dict[str, Any]]
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


class _Memory:
    """What a `ShardOptimizer` works on: parameters in the arena, state in the server's own memory."""

    def __init__(self, arena: ServerArena, block_bytes: Sequence[int]) -> None:
        self.layout: FlatLayout = arena.layout
        self.parameters = arena.parameters
        self._blocks = [torch.zeros(size, dtype=torch.uint8) for size in block_bytes]

    def chunk_of(self, flat: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        return flat[chunk.start : chunk.stop].view(chunk.dtype)

    def state_block(self, number: int) -> torch.Tensor:
        return self._blocks[number]


class _Hand:
    """What one thread needs to update chunks: an optimizer, and room for what it works out."""

    def __init__(self, optimizer: ShardOptimizer, room: int) -> None:
        self.optimizer = optimizer
        self.scratch = torch.empty(room, dtype=torch.uint8)
        self.correction = torch.empty(room, dtype=torch.uint8)


class Container:
    """The parameters of one name on one server."""

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
        self._make_optimizer()
        self._sums = torch.zeros(self.layout.bytes if settings.recording else 0, dtype=torch.uint8)
        self._last_touched: list[int] = []
        self.tables = [Table(table, spec.optimizer.name, server, spec.servers) for table in spec.tables]
        self.rows: dict[int, list[Rows]] = {}  # by replica: its gradients for the tables
        self.staged: dict[int, int] = {}  # by replica: the ticket whose gradient is here
        self.used: dict[int, int] = {}  # by replica: the last ticket that went into a step
        self.incarnations: dict[int, int] = {}  # the newest of each replica
        self.not_pulled: set[int] = set()  # replicas of which it is not known what they computed on
        self.addresses: list[str] = []  # of all servers
        self.journal: Journal | PeerJournal | None = None  # where everything is noted before it is acknowledged
        self._frozen: dict[int, FrozenCopy] = {}

    @property
    def step(self) -> int:
        return self.arena.version

    @property
    def bytes(self) -> int:
        return self.layout.bytes

    def _make_optimizer(self) -> None:
        self._users = make_optimizer(self.spec.optimizer)
        states = StateLayout(self._users, self.layout, {})
        self._entries = {
            piece.slot: entries
            for chunk, of_chunk in zip(self.layout.chunks, states.entries, strict=True)
            for piece, entries in zip(chunk.pieces, of_chunk, strict=True)
        }
        memory = _Memory(self.arena, states.block_bytes)
        largest = max((chunk.bytes for chunk in self.layout.chunks), default=0)
        self._hands = [_Hand(ShardOptimizer(self._users, memory, states), largest) for _ in range(HANDS)]

    def reopen(self, spec: Spec, settings: Settings) -> None:
        """Another run goes on with what is here: it may have other replicas, and other options of the optimizer."""
        with self.lock:
            if settings.run == self.settings.run:
                return
            state, old = self._state(), self.arena
            if settings.replicas != self.settings.replicas:
                self.arena = ServerArena.create(self.layout, settings.replicas)
                self.arena.parameters.copy_(old.parameters)
                self.arena.version = old.version
                old.arena.close()
            self.spec, self.settings = spec, settings
            self.shards = Shards(spec)
            self.layout = self.arena.layout = self.shards.layouts[self.server]
            self._make_optimizer()
            self._take_state(state)
            self._sums = torch.zeros(self.layout.bytes if settings.recording else 0, dtype=torch.uint8)
            for of_run in (self.staged, self.used, self.rows, self.incarnations):
                of_run.clear()
            self.reopened = self.filled

    def take_over(self, copy: FrozenCopy) -> None:
        """Begin with what another container was."""
        with self.lock:
            self.arena.parameters.copy_(copy.parameters)
            self._take_state(copy.state)
            for table, held in zip(self.tables, copy.tables, strict=True):
                table.weight.copy_(held.weight)
                table.state = {key: value.clone() for key, value in held.state.items()}
                table.steps = held.steps
            self.fill(copy.step)

    def close(self) -> None:
        """Give the memory back."""
        with self.lock:
            self._frozen.clear()
            for arena in (self.arena.arena, *(table.arena for table in self.tables)):
                arena.close()

    # ── gradients ────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, replica: int, incarnation: int) -> None:
        """A process takes the place of `replica`: older ones are not listened to any more."""
        self.incarnations[replica] = max(incarnation, self.incarnations.get(replica, 0))

    def push(self, pushed: Pushed, rows: list[Rows], *, shared: bool) -> None:
        """A gradient lies in its replica's place now; `shared`: and what it was computed on in its own."""
        replica = pushed.replica
        if pushed.incarnation < self.incarnations.get(replica, 0):
            raise PacelineError(f"replica {replica} was started again since: this process no longer takes part")
        journal = self.journal
        if journal is None:
            self.take_push(pushed, rows)
        else:
            of_tables = [part for given in rows for part in given.tensors]
            parts = journal.seal(pushed, packed([self.arena.gradients[replica], *of_tables]))
            with journal.lock:  # a snapshot has it, or the log that follows
                self.take_push(pushed, rows)
                written = journal.write(pushed, parts)
            journal.flush(written)
        if shared:
            self.not_pulled.discard(replica)

    def take_push(self, pushed: Pushed, rows: list[Rows]) -> None:
        self.stage(pushed.replica, pushed.ticket, pushed.untouched)
        if rows:
            self.stage_rows(pushed.replica, rows)

    def stage(self, replica: int, ticket: int, untouched: Iterable[int]) -> None:
        """The gradient of that ticket lies in the replica's place now."""
        touched = self.arena.touched[replica]
        touched.fill_(1)
        for slot in untouched:
            if not 0 <= slot < len(self.layout.slots):
                raise PacelineError(f"slot {slot} does not exist: this server has {len(self.layout.slots)}")
            touched[slot] = 0
        self.staged[replica] = ticket

    def stage_rows(self, replica: int, rows: list[Rows]) -> None:
        """The replica's gradients for every table."""
        for table, given in zip(self.tables, rows, strict=True):
            if given.ids.numel() and not (int(given.ids.min()) >= 0 and int(given.ids.max()) < table.rows):
                raise PacelineError(f"a row of {table.spec.name} does not exist: this server has {table.rows}")
        self.rows[replica] = rows

    def _rows_of(self, close: Close, number: int) -> list[tuple[Rows, float]]:
        return [
            (self.rows[accepted.replica][number], accepted.weight)
            for accepted in close.accepted
            if accepted.replica in self.rows
        ]

    def check_staged(self, close: Close) -> None:
        """Whether all gradients of a step are here; those in shared memory are not announced."""
        for accepted in close.accepted:
            staged = self.staged.get(accepted.replica)
            if staged is not None and staged != accepted.ticket:
                raise PacelineError(
                    f"the gradient of replica {accepted.replica} for step {close.step} is not on server {self.server}"
                )

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────

    def squared_norm(self, close: Close) -> float:
        """The squared length of the step's gradient, as far as it lies here."""
        check_close(close, self.settings.replicas)
        with self.lock:
            touched = self._touched(close)
            total = 0.0
            for chunk in self.layout.chunks:
                gradient = self._gradient(close, chunk, self._hands[0])
                for piece in chunk.pieces:
                    if touched[piece.slot]:
                        slot = self.layout.slots[piece.slot]
                        begin = (slot.offset - chunk.start) // slot.dtype.itemsize
                        part = gradient[begin : begin + piece.elements]
                        total += float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2
            for number, table in enumerate(self.tables):
                if given := self._rows_of(close, number):
                    total += float(torch.linalg.vector_norm(table.summed(given).values, dtype=torch.float64)) ** 2
            return total

    def apply(
        self, close: Close, options: Sequence[Mapping[str, Option]], scale: float = 1.0, *, noted: bool = False
    ) -> None:
        """Make the step. One that was made before is not made again. `noted`: it is in the journal already."""
        check_close(close, self.settings.replicas)
        check_options(options, self.spec.optimizer.groups)
        with self.lock:
            if close.step == self.step:
                self._apply(close, options, scale, noted=noted)
            elif close.step > self.step:
                raise PacelineError(f"server {self.server} is at step {self.step} and cannot make step {close.step}")
        if not noted and self.journal is not None:
            self.journal.flush()  # also if it was made before: whoever asked then may not have been answered

    def _apply(self, close: Close, options: Sequence[Mapping[str, Option]], scale: float, *, noted: bool) -> None:
        self.check_staged(close)
        if not noted:
            self.note(Made(close=close, options=[dict(given) for given in options], scale=scale))
        self._take_options(options, close.lr)
        touched = self._last_touched = self._touched(close)
        self._update_chunks(close, touched, scale)
        for number, table in enumerate(self.tables):
            if given := self._rows_of(close, number):
                table.update(given, self._users.param_groups[table.spec.group], scale)
        self.arena.version = close.step + 1
        self.used.update((accepted.replica, accepted.ticket) for accepted in close.accepted)
        if self.journal is not None:
            self.journal.made()

    def _update_chunks(self, close: Close, touched: Sequence[int], scale: float) -> None:
        def update(first: int) -> None:
            for number in range(first, len(self.layout.chunks), HANDS):
                self._update_chunk(number, self._hands[first], close, touched, scale)

        # After the gradient of one alone, the others are computing and need the cores.
        if len(close.accepted) == 1 or len(self.layout.chunks) < HANDS:
            for first in range(HANDS):
                update(first)
        else:
            together([partial(update, first) for first in range(HANDS)])

    def _update_chunk(self, number: int, hand: _Hand, close: Close, touched: Sequence[int], scale: float) -> None:
        chunk, words = self.layout.chunks[number], self.arena.words
        gradient = self._gradient(close, chunk, hand)
        if self._sums.numel():
            self.arena.chunk_of(self._sums, chunk).copy_(gradient)
        if scale != 1.0:
            gradient = torch.mul(gradient, scale, out=self._typed(hand.scratch, chunk))
        words[number + 1] += 1
        try:
            hand.optimizer.update(number, gradient, touched)
        finally:
            words[number + 1] += 1  # nobody must wait for a chunk that is never finished

    def _take_state(self, states: States) -> None:
        self._hands[0].optimizer.take_state(states)
        for hand in self._hands:
            hand.optimizer.forget()

    def note(self, made: Made, body: Sequence[memoryview] = ()) -> None:
        """Write a step to the journal: the gradients that make it are there by then. Somebody has to `flush` it."""
        journal = self.journal
        if journal is None:
            return
        with journal.lock:
            for accepted in made.close.accepted:
                if self._corrects(accepted, made.close.compensation):
                    pulled = PulledCopy(replica=accepted.replica)
                    journal.write(pulled, journal.seal(pulled, packed([self.arena.pulled[accepted.replica]])))
            journal.write(made, journal.seal(made, body))

    def _take_options(self, options: Sequence[Mapping[str, Option]], factor: float) -> None:
        for group, given in zip(self._users.param_groups, options, strict=True):
            group.update(restored_options(given))
            group["lr"] = group["lr"] * factor
        for hand in self._hands:
            hand.optimizer.refresh_options()

    def _touched(self, close: Close) -> list[int]:
        rows = [accepted.replica for accepted in close.accepted]
        touched: list[int] = self.arena.touched[rows].amax(0).tolist()
        return touched

    def _gradient(self, close: Close, chunk: Chunk, hand: _Hand) -> torch.Tensor:
        """The weighted sum of the accepted gradients over a chunk."""
        first, *others = close.accepted
        total = self._one_gradient(first, chunk, close.compensation, hand)
        if others or first.weight != 1.0:
            total = torch.mul(total, first.weight, out=self._typed(hand.scratch, chunk))
        for accepted in others:
            total.add_(self._one_gradient(accepted, chunk, close.compensation, hand), alpha=accepted.weight)
        return total

    def _one_gradient(self, accepted: Accepted, chunk: Chunk, compensation: float, hand: _Hand) -> torch.Tensor:
        gradient = self.arena.chunk_of(self.arena.gradients[accepted.replica], chunk)
        if not self._corrects(accepted, compensation):
            return gradient
        # What the gradient would be on the parameters as they are now, to first order: g + H (now - pulled). The
        # Hessian's diagonal is about the mean square of the samples' gradients (Fisher), which is as many times the
        # square of their mean as there are samples. A correction larger than the gradient is beyond what the first
        # order tells: with large steps it would swing by itself.
        pulled = self.arena.chunk_of(self.arena.pulled[accepted.replica], chunk)
        now = self.arena.chunk_of(self.arena.parameters, chunk)
        correction = torch.sub(now, pulled, out=self._typed(hand.correction, chunk))
        relative = correction.mul_(gradient).mul_(compensation * accepted.samples).clamp_(-1.0, 1.0)
        return relative.add_(1.0).mul_(gradient)

    def _corrects(self, accepted: Accepted, compensation: float) -> bool:
        return bool(compensation and accepted.staleness and accepted.replica not in self.not_pulled)

    @staticmethod
    def _typed(flat: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        return flat[: chunk.bytes].view(chunk.dtype)

    # ── parameters out ───────────────────────────────────────────────────────────────────────────────────

    def pull(self, replica: int) -> tuple[int, torch.Tensor]:
        """The parameters as they are now, copied to where they are remembered as this replica's; and the step."""
        check_place(replica, self.settings.replicas)
        with self.lock:
            place = self.arena.pulled[replica]
            place.copy_(self.arena.parameters)
            self.not_pulled.discard(replica)
            return self.step, place

    def freeze(self, number: int, extras: Tensors = (), books: Books | None = None) -> FrozenCopy:
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
                self._state(),
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
        """The gradient of the last step (while recording), and the slots that have one."""
        with self.lock:
            return self._sums.clone(), [slot for slot, touched in enumerate(self._last_touched) if touched]

    def _state(self) -> States:
        return {
            slot: {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
            for slot, state in self._hands[0].optimizer.give_state().items()
        }

    # ── values in ────────────────────────────────────────────────────────────────────────────────────────

    def fill(self, step: int = 0) -> None:
        """The parameters have been written into the arena."""
        with self.lock:
            self.arena.version = step
            self.filled = True

    def check_states(self, states: States) -> None:
        """Whether state that was sent fits the slots here; before anything is changed."""
        for slot, state in states.items():
            if not 0 <= slot < len(self.layout.slots):
                raise PacelineError(f"slot {slot} does not exist: this server has {len(self.layout.slots)}")
            for entry in self._entries.get(slot, ()):
                value = state.get(entry.key)
                if isinstance(value, torch.Tensor) and value.numel() != math.prod(entry.shape):
                    raise PacelineError(f"{entry.key} of slot {slot} has {value.numel()} values: {entry.shape} fit")

    def restore_state(self, states: States) -> None:
        with self.lock:
            self._take_state(states)

    def put_rows(self, put: RowsPut, values: torch.Tensor) -> None:
        """Values for some rows of a table, or of its optimizer's state."""
        table, journal = self.tables[put.table], self.journal
        with self.lock, journal.lock if journal is not None else contextlib.nullcontext():
            if len(values):
                table.put(put.key, put.start, values)
            if put.steps is not None:
                table.steps = put.steps
            if journal is not None:
                body = packed([values])
                journal.write(put, journal.seal(put, body))
        if journal is not None:
            journal.flush()

    def forget_pulled(self) -> None:
        """What replicas have pulled went with the process: until they pull again, nothing is corrected by it."""
        self.not_pulled = set(range(self.settings.replicas))
