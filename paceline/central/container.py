"""One server's share of a container: parameters, their optimizer, and the gradients that wait to be used.

A step is made chunk by chunk, a megabyte that stays in the cache: the accepted gradients are added up in the order of
the close, corrected for staleness if the rule says so, and the optimizer updates the chunk in place. All servers follow
the chief's closes one by one, so after the same number of steps they hold parts of the same parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.central.chief import Accepted, Close
from paceline.central.protocol import Settings
from paceline.central.shards import Option, Shards, Spec, make_optimizer, restored_options
from paceline.central.tables import Rows, Table, TableCopy
from paceline.errors import PacelineError
from paceline.exchange.wire import wire
from paceline.memory.layout import Chunk, Layout
from paceline.memory.server_arena import ServerArena
from paceline.owners.optimizer import ShardOptimizer
from paceline.owners.state import StateLayout

MOST_FROZEN = 4  # copies that are being read at a time

States = dict[int, dict[str, Any]]


@dataclass(frozen=True)
class Frozen:
    """A copy of everything after some step, to be read while training goes on."""

    number: int
    step: int
    parameters: torch.Tensor
    state: States
    tables: list[TableCopy]


class _Memory:
    """What a `ShardOptimizer` works on: parameters in the arena, state in the server's own memory."""

    def __init__(self, arena: ServerArena, block_bytes: Sequence[int]) -> None:
        self.layout: Layout = arena.layout
        self.parameters = arena.parameters
        self._blocks = [torch.zeros(size, dtype=torch.uint8) for size in block_bytes]

    def chunk_of(self, flat: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        return flat[chunk.start : chunk.stop].view(chunk.dtype)

    def state_block(self, number: int) -> torch.Tensor:
        return self._blocks[number]


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
        self.lock = threading.RLock()  # held while parameters are written, or read as a whole
        self._users = make_optimizer(spec.optimizer)
        states = StateLayout(self._users, self.layout, {})
        self._optimizer = ShardOptimizer(self._users, _Memory(self.arena, states.block_bytes), states)
        largest = max((chunk.bytes for chunk in self.layout.chunks), default=0)
        self._scratch = torch.empty(largest, dtype=torch.uint8)
        self._correction = torch.empty(largest, dtype=torch.uint8)
        self._sums = torch.zeros(self.layout.bytes if settings.recording else 0, dtype=torch.uint8)
        self._last_touched: list[int] = []
        self.tables = [Table(table, spec.optimizer.name, server, spec.servers) for table in spec.tables]
        self._rows: dict[int, list[Rows]] = {}  # by replica: its gradients for the tables
        self._staged: dict[int, int] = {}  # by replica: the ticket whose gradient is here
        self._frozen: dict[int, Frozen] = {}

    @property
    def step(self) -> int:
        return self.arena.version

    @property
    def bytes(self) -> int:
        return self.layout.bytes

    # ── gradients ────────────────────────────────────────────────────────────────────────────────────────

    def stage(self, replica: int, ticket: int, untouched: Iterable[int]) -> None:
        """The gradient of that ticket lies in the replica's place now."""
        touched = self.arena.touched[replica]
        touched.fill_(1)
        for slot in untouched:
            if not 0 <= slot < len(self.layout.slots):
                raise PacelineError(f"slot {slot} does not exist: this server has {len(self.layout.slots)}")
            touched[slot] = 0
        self._staged[replica] = ticket

    def stage_rows(self, replica: int, rows: list[Rows]) -> None:
        """The replica's gradients for every table."""
        for table, given in zip(self.tables, rows, strict=True):
            if given.ids.numel() and not (int(given.ids.min()) >= 0 and int(given.ids.max()) < table.rows):
                raise PacelineError(f"a row of {table.spec.name} does not exist: this server has {table.rows}")
        self._rows[replica] = rows

    def _rows_of(self, close: Close, number: int) -> list[tuple[Rows, float]]:
        return [
            (self._rows[accepted.replica][number], accepted.weight)
            for accepted in close.accepted
            if accepted.replica in self._rows
        ]

    def check_staged(self, close: Close) -> None:
        """Whether all gradients of a step are here; those in shared memory are not announced."""
        for accepted in close.accepted:
            staged = self._staged.get(accepted.replica)
            if staged is not None and staged != accepted.ticket:
                raise PacelineError(
                    f"the gradient of replica {accepted.replica} for step {close.step} is not on server {self.server}"
                )

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────

    def squared_norm(self, close: Close) -> float:
        """The squared length of the step's gradient, as far as it lies here."""
        with self.lock:
            touched = self._touched(close)
            total = 0.0
            for chunk in self.layout.chunks:
                gradient = self._gradient(close, chunk)
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

    def apply(self, close: Close, options: Sequence[Mapping[str, Option]], scale: float = 1.0) -> None:
        """Make the step. One that was made before is not made again."""
        with self.lock:
            if close.step < self.step:
                return
            if close.step > self.step:
                raise PacelineError(f"server {self.server} is at step {self.step} and cannot make step {close.step}")
            self.check_staged(close)
            self._take_options(options, close.lr)
            touched = self._last_touched = self._touched(close)
            words = self.arena.words
            for number, chunk in enumerate(self.layout.chunks):
                gradient = self._gradient(close, chunk)
                if self._sums.numel():
                    self.arena.chunk_of(self._sums, chunk).copy_(gradient)
                if scale != 1.0:
                    gradient = torch.mul(gradient, scale, out=self._typed(self._scratch, chunk))
                words[number + 1] += 1
                self._optimizer.update(number, gradient, touched)
                words[number + 1] += 1
            for number, table in enumerate(self.tables):
                if given := self._rows_of(close, number):
                    table.update(given, self._users.param_groups[table.spec.group], scale)
            self.arena.version = close.step + 1

    def _take_options(self, options: Sequence[Mapping[str, Option]], factor: float) -> None:
        if len(options) != len(self._users.param_groups):
            raise PacelineError(f"{len(options)} groups of options do not fit {len(self._users.param_groups)}")
        for group, given in zip(self._users.param_groups, options, strict=True):
            group.update(restored_options(given))
            group["lr"] = group["lr"] * factor
        self._optimizer.refresh_options()

    def _touched(self, close: Close) -> list[int]:
        rows = [accepted.replica for accepted in close.accepted]
        touched: list[int] = self.arena.touched[rows].amax(0).tolist()
        return touched

    def _gradient(self, close: Close, chunk: Chunk) -> torch.Tensor:
        """The weighted sum of the accepted gradients over a chunk."""
        first, *others = close.accepted
        total = self._one_gradient(first, chunk, close.compensation)
        if others or first.weight != 1.0:
            total = torch.mul(total, first.weight, out=self._typed(self._scratch, chunk))
        for accepted in others:
            total.add_(self._one_gradient(accepted, chunk, close.compensation), alpha=accepted.weight)
        return total

    def _one_gradient(self, accepted: Accepted, chunk: Chunk, compensation: float) -> torch.Tensor:
        gradient = self.arena.chunk_of(self.arena.gradients[accepted.replica], chunk)
        if not compensation or not accepted.staleness:
            return gradient
        # What the gradient would be on the parameters as they are now, to first order: the Hessian's diagonal is
        # about the square of the gradient.
        pulled = self.arena.chunk_of(self.arena.pulled[accepted.replica], chunk)
        now = self.arena.chunk_of(self.arena.parameters, chunk)
        correction = torch.sub(now, pulled, out=self._typed(self._correction, chunk))
        return correction.mul_(gradient).mul_(gradient).mul_(compensation).add_(gradient)

    @staticmethod
    def _typed(flat: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        return flat[: chunk.bytes].view(chunk.dtype)

    # ── parameters out ───────────────────────────────────────────────────────────────────────────────────

    def pull(self, replica: int) -> tuple[int, torch.Tensor]:
        """The parameters as they are now, copied to where they are remembered as this replica's; and the step."""
        with self.lock:
            place = self.arena.pulled[replica]
            place.copy_(self.arena.parameters)
            return self.step, place

    def freeze(self, number: int) -> Frozen:
        with self.lock:
            while len(self._frozen) >= MOST_FROZEN:  # somebody has not said that it is done
                del self._frozen[min(self._frozen)]
            self._frozen[number] = Frozen(
                number,
                self.step,
                self.arena.parameters.clone(),
                self._state(),
                [table.copy() for table in self.tables],
            )
            return self._frozen[number]

    def frozen(self, number: int) -> Frozen:
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
            for slot, state in self._optimizer.give_state().items()
        }

    # ── values in ────────────────────────────────────────────────────────────────────────────────────────

    def fill(self, step: int = 0) -> None:
        """The parameters have been written into the arena."""
        with self.lock:
            self.arena.version = step
            self.filled = True

    def restore_state(self, states: States) -> None:
        with self.lock:
            self._optimizer.take_state(states)


# ── chunks on a wire ─────────────────────────────────────────────────────────────────────────────────────────


class Coding:
    """How a server's flat buffer looks on a wire: chunk after chunk, each coded by itself.

    Chunks of float32 are coded as the wire says, others travel as they are.
    """

    def __init__(self, layout: Layout, name: str) -> None:
        self._layout = layout
        self._wire = wire(name)
        self.exact = name == "fp32"

    def bytes_of(self, chunk: Chunk) -> int:
        if self.exact or chunk.dtype != torch.float32:
            return chunk.bytes
        return self._wire.encoded_bytes(chunk.bytes // 4)

    @property
    def bytes(self) -> int:
        return sum(map(self.bytes_of, self._layout.chunks))

    @property
    def most(self) -> int:
        """The bytes of the largest chunk."""
        return max(map(self.bytes_of, self._layout.chunks), default=0)

    def encode(self, flat: torch.Tensor, chunk: Chunk, room: torch.Tensor) -> torch.Tensor:
        """The chunk's bytes: in place, or coded into `room`."""
        source = flat[chunk.start : chunk.stop]
        if self.exact or chunk.dtype != torch.float32:
            return source
        coded = room[: self.bytes_of(chunk)]
        self._wire.encode(source.view(torch.float32), coded)
        return coded

    def decode(self, coded: torch.Tensor, flat: torch.Tensor, chunk: Chunk) -> None:
        self._wire.decode(coded, flat[chunk.start : chunk.stop].view(torch.float32))
