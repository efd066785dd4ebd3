"""What a wire remembers from step to step, in the arena of its host and in checkpoints.

A lossy wire owes what it has not sent. For every trained value that is one number a host: of a value that this host
sends to another to be summed, or, of those it sums itself, of the sum that it sends out. So a value may change from
one role to the other (other hosts, other replicas) and nothing is counted twice or lost: what all hosts owe together is
what the sums so far lack. In a checkpoint it is there by host and parameter; of fewer hosts some owe for several.

powersgd remembers the basis of every matrix too, which is the same on all hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.exchange.coded_sums import CodedSum, Owed, Round, range_sum
from paceline.exchange.host_sums import HostSums
from paceline.exchange.links import Links
from paceline.exchange.low_rank import LowRankSum, Matrix, as_matrix, first_basis
from paceline.exchange.wire import wire
from paceline.exchange.wire_names import matrix_rank
from paceline.memory.layout import Chunk, FlatLayout, Slot
from paceline.memory.model_arena import ModelArena

_COLLECT = 1 << 30  # the tag of what is sent for a checkpoint: no chunk has that number


class WireMemory:
    """What one host's wire remembers of all trained parameters."""

    def __init__(self, wire_name: str, of: str) -> None:
        """`of`: what is sent. What is owed of gradients is no part of anything else."""
        self._wire_name, self._of = wire_name, of
        self._rank = matrix_rank(wire_name)
        self._turn = 0  # which of both buffers has what is owed
        self._sums: HostSums | None = None

    def connect(self, links: Links | None) -> None:
        """From now on values are summed over these links; None: this process has no like on other hosts."""
        self._links = links
        self._sums = HostSums(links, self._make) if links is not None else None

    def sum(self, first: int, values: torch.Tensor) -> None:
        """Replaces the values of neighbouring chunks, from that one on, by their sum over all hosts."""
        if self._sums is not None:
            self._sums.sum(first, values)
        elif self._owes and values.is_floating_point() and values.dtype.itemsize <= 4:
            self._pay(first, values)

    def _pay(self, first: int, values: torch.Tensor) -> None:
        """No other host is left: what is owed is added, and nothing will be owed any more."""
        chunk = self._arena.layout.chunks[first]
        owed, proposed = self._in_turn(self._owed(self._firsts[first], values.numel()))
        values.copy_(values.float() + owed)
        proposed.zero_()
        for _, (basis, next_basis) in self._matrices_in(chunk, values.numel()):
            next_basis.copy_(basis)

    def keep_untouched(self, number: int, touched: Sequence[int]) -> None:
        """A step is being made; `touched`: by slot, whether it is updated. Of those of a chunk that are not, what was
        sent is not used: what was owed before still is."""
        if not self._owes:
            return
        layout, chunk = self._arena.layout, self._arena.layout.chunks[number]
        for piece in chunk.pieces:
            slot = layout.slots[piece.slot]
            if touched[piece.slot] or not _is_coded(slot):
                continue
            first = self._first_of(slot, number) + piece.start
            pairs = [self._owed(first, piece.elements)]
            if piece.slot in self._bases:
                pairs.append(self._bases[piece.slot])
            for owed, proposed in map(self._in_turn, pairs):
                proposed.copy_(owed)

    @property
    def whole_tensors(self) -> bool:
        """Whether no tensor may be cut."""
        return self._rank is not None

    @property
    def _owes(self) -> bool:
        return self._rank is not None or wire(self._wire_name).lossy

    def floats(self, layout: FlatLayout) -> tuple[int, int]:
        """Returns how many numbers there are to be remembered: that are owed, and of bases."""
        matrices = self._matrices(layout)
        bases = sum(columns * self._rank for _, columns in matrices.values()) if self._rank is not None else 0
        return (layout.trained_bytes // 4 * _floats_a_word(layout) if self._owes else 0), bases

    def _matrices(self, layout: FlatLayout) -> dict[int, tuple[int, int]]:
        """Returns rows and columns by slot."""
        if self._rank is None:
            return {}
        shapes = {
            number: as_matrix(slot.shape, self._rank)
            for number, slot in enumerate(layout.slots)
            if slot.group is not None and _is_coded(slot)
        }
        return {number: shape for number, shape in shapes.items() if shape is not None}

    def open(self, arena: ModelArena) -> None:
        """The model lies there, and so does what is remembered of it."""
        self._arena = arena
        self._firsts = _first_floats(arena.layout.chunks)  # by chunk: where what is owed of it begins
        self._bases: dict[int, Owed] = {}  # by slot
        start = 0
        for number, (rows, columns) in self._matrices(arena.layout).items():
            assert self._rank is not None
            stop = start + columns * self._rank
            basis, proposed = (buffer[start:stop].view(columns, self._rank) for buffer in arena.bases)
            if not basis.any():  # all replicas of the host fill in the same
                basis.copy_(first_basis(Matrix(0, rows, columns, number), self._rank))
            self._bases[number] = (basis, proposed)
            start = stop

    def _make(self, first: int, elements: int) -> CodedSum:
        """Returns the sum of neighbouring chunks of the model, from that one on."""
        layout, links = self._arena.layout, self._links
        assert links is not None
        chunk = layout.chunks[first]
        like = torch.empty(elements, device=self._arena.parameters.device)
        owed = self._in_turn(self._owed(self._firsts[first], elements)) if self._owes else None
        if self._rank is None:
            return range_sum(like, links.host, links.hosts, wire(self._wire_name), owed)
        assert owed is not None
        found = self._matrices_in(chunk, elements)
        matrices, bases = [matrix for matrix, _ in found], [pair for _, pair in found]
        return LowRankSum(elements, matrices, self._rank, links.host, links.hosts, owed, bases)

    def _matrices_in(self, chunk: Chunk, elements: int) -> list[tuple[Matrix, Owed]]:
        """Returns the matrices among so many values from a chunk on, each with its basis and room for the next."""
        layout, size = self._arena.layout, chunk.dtype.itemsize
        found = []
        for number, (rows, columns) in self._matrices(layout).items():
            if chunk.start <= (offset := layout.slots[number].offset) < chunk.start + elements * size:
                matrix = Matrix((offset - chunk.start) // size, rows, columns, number)
                found.append((matrix, self._in_turn(self._bases[number])))
        return found

    def _owed(self, first: int, elements: int) -> Owed:
        one, other = self._arena.owed[:, first : first + elements]
        return one, other

    def _in_turn(self, pair: Owed) -> Owed:
        return (pair[self._turn], pair[1 - self._turn])

    def commit(self) -> None:
        """The step was accepted."""
        if self._sums is not None:
            self._sums.commit()
        self._turn = 1 - self._turn

    def bases(self) -> list[torch.Tensor]:
        """Returns what all hosts remember alike."""
        return [self._in_turn(pair)[0] for pair in self._bases.values()]

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────

    def collect(self) -> dict[str, torch.Tensor]:
        """Returns what is to be in a checkpoint, on host 0; one process of each host calls this."""
        if not self._owes:
            return {}
        own, links = self._arena.owed[self._turn], self._links
        received = [own]
        if links is not None:
            nothing, hosts = torch.empty(0), range(links.hosts)
            sent = [own if links.host > 0 and other == 0 else nothing for other in hosts]
            received = [torch.empty_like(own) if links.host == 0 and other > 0 else nothing for other in hosts]
            links.exchange(Round(received, sent), _COLLECT)
            if links.host > 0:
                return {}
        bases = {number: self._in_turn(pair)[0] for number, pair in self._bases.items()}
        slots = self._arena.layout.slots
        return {
            f"{self._of}/{host}/{slot.name}": self._part(flat, slot)
            for host, flat in enumerate([own, *received[1:]])
            for slot in slots
            if slot.group is not None and _is_coded(slot)
        } | {f"basis/{slots[number].name}": basis for number, basis in bases.items()}

    def take(self, saved: dict[str, torch.Tensor], at: int, hosts: int) -> None:
        """Goes on from what a checkpoint has, as host `at` of so many; one process of each host calls this."""
        if not self._owes:
            return
        names = {slot.name: slot for slot in self._arena.layout.slots if slot.group is not None and _is_coded(slot)}
        owed = self._arena.owed[self._turn].zero_()
        for key, value in saved.items():
            of, _, rest = key.partition("/")
            host, _, name = rest.partition("/")
            if of == self._of and name in names and int(host) % hosts == at:
                self._part(owed, names[name]).add_(value)
        for number, pair in self._bases.items():
            basis = saved.get(f"basis/{self._arena.layout.slots[number].name}")
            if basis is not None and basis.shape == pair[0].shape:
                self._in_turn(pair)[0].copy_(basis)

    def _part(self, flat: torch.Tensor, slot: Slot) -> torch.Tensor:
        chunks = self._arena.layout.chunks
        number = next((at for at, chunk in enumerate(chunks) if chunk.start <= slot.offset < chunk.stop), None)
        first = self._first_of(slot, number) if number is not None else 0  # it is empty
        return flat[first : first + slot.elements].view(slot.shape)

    def _first_of(self, slot: Slot, number: int) -> int:
        """Returns where what is owed of a tensor begins, some of which is in that chunk."""
        start = self._arena.layout.chunks[number].start
        return self._firsts[number] + (slot.offset - start) // slot.dtype.itemsize


def _is_coded(slot: Slot) -> bool:
    """Whether values of this type are coded at all: in float32, that is."""
    return slot.dtype.is_floating_point and slot.dtype.itemsize <= 4


def _first_floats(chunks: Sequence[Chunk]) -> list[int]:
    """Returns by chunk where its values begin among all values: neighbours of one type are one range, however they are
    summed."""
    firsts: list[int] = []
    for before, chunk in zip((None, *chunks), chunks, strict=False):
        if before is None:
            firsts.append(0)
        else:
            bytes_between = (chunk.start if chunk.dtype == before.dtype else before.stop) - before.start
            firsts.append(firsts[-1] + bytes_between // before.dtype.itemsize)
    return firsts


def _floats_a_word(layout: FlatLayout) -> int:
    """Returns how many values may lie in four bytes of the model."""
    return max((4 // slot.dtype.itemsize for slot in layout.slots if slot.group is not None), default=1) or 1
