"""An owner: sums the gradients of its shard and updates it, and takes over from an owner that died.

The work goes chunk by chunk, about two megabytes each, which stay in the cache:

    copy the chunk (parameters, state) to the undo space → note the chunk on the board
    → sum its gradients → optimizer → mark it updated → clear the note

Whoever is killed in between leaves a note. The lowest-ranked survivor puts the noted chunk back as it was, updates
every chunk of the dead owner's shard that is not marked, and reports in its place. It may be killed as well: the
next one finds its note, and goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from paceline.exchange.members import Members
from paceline.exchange.together import Together
from paceline.exchange.words import Phase, Word
from paceline.memory.layout import Chunk, assign
from paceline.memory.model_arena import ModelArena
from paceline.optim.shard_optimizer import ShardOptimizer


class Owner:
    """The owner's side of one replica."""

    def __init__(
        self,
        together: Together,
        arena: ModelArena,
        optimizer: ShardOptimizer,
        bucket_bytes: int | None = None,
        arrived: Callable[[int], None] = lambda chunk: None,
    ) -> None:
        """`arrived(chunk)` returns when that chunk is summed over all hosts."""
        self._together = together
        self._arena = arena
        self._optimizer = optimizer
        self._bucket_bytes, self._arrived = bucket_bytes, arrived
        self._ranks: tuple[int, ...] = ()
        self._shards: dict[int, list[list[int]]] = {}
        self._touched: list[int] = []
        self._rows: list[Sequence[int]] | None = None  # by chunk: whose buffers have something; None: everybody's
        self._weights: Mapping[int, float] | None = None  # by rank: what its gradient counts; None: all are added
        largest = max((chunk.bytes for chunk in arena.layout.chunks), default=0)
        self._buffer = torch.empty(largest, dtype=torch.uint8)

    # ── shards ───────────────────────────────────────────────────────────────────────────────────────────

    def divide(self, ranks: tuple[int, ...]) -> None:
        """Divide the chunks among these owners. All the state is in the arena, so a shard just changes hands."""
        if ranks == self._ranks:
            return
        self._ranks = ranks
        shards = assign(self._arena.layout.chunks, len(ranks), self._bucket_bytes)
        self._shards = dict(zip(ranks, shards, strict=True))
        self._optimizer.forget()

    def buckets(self, rank: int) -> list[list[int]]:
        """The chunks of `rank`'s shard, by bucket."""
        return self._shards[rank]

    def chunks(self, rank: int) -> list[int]:
        return [number for bucket in self._shards.get(rank, []) for number in bucket]

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────

    def begin(
        self,
        touched: list[int],
        by_rank: Mapping[int, Sequence[int]] | None = None,
        weights: Mapping[int, float] | None = None,
    ) -> None:
        """All gradients of a step are there. `touched`: by slot, whether anybody has one. `by_rank`, where devices have
        gradients for parts of a model: by rank and slot, whether that buffer has one. `weights`: what the gradient of
        each rank counts; None: they are added as they are."""
        self._touched, self._weights = touched, weights
        self._rows = None if by_rank is None else [self.filled(chunk, by_rank) for chunk in self._arena.layout.chunks]
        self._optimizer.refresh_options()

    @staticmethod
    def filled(chunk: Chunk, by_rank: Mapping[int, Sequence[int]]) -> list[int]:
        """Whose buffers have something of a chunk, by rank and slot."""
        found = [rank for rank, touched in by_rank.items() if any(touched[piece.slot] for piece in chunk.pieces)]
        return found or list(by_rank)[:1]  # nobody's: the optimizer will not look at it

    def norm(self, members: Members) -> float:
        """Length of the whole gradient. Summed by chunk in fixed order: the same bits whoever owns what."""

        def measure(number: int) -> None:
            gradient = self.gradient(members, number)
            gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            self._arena.norms[number] = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()

        self._finish(members, Word.NORMED, measure)
        return math.sqrt(self._arena.norms.sum().item())

    def update(self, members: Members, scale: float) -> None:
        """Apply the step: this owner's shard, and those of owners that die meanwhile."""
        updated, me = self._arena.updated, self._together.replica
        # With nobody to take over, or of a cut model, whose devices no death leaves whole, nothing is kept to undo.
        alone = len(members.ranks) == 1 or self._rows is not None

        def work(number: int) -> None:
            if alone:
                self._optimizer.update(number, self.gradient(members, number, scale), self._touched)
                return
            if updated[number] == members.op:
                return
            parameters, block = self._bytes(number)
            kept_parameters, kept_block = self._arena.undo(me, number)
            kept_parameters.copy_(parameters)
            kept_block.copy_(block)
            self._together.board.set(me, Word.UNDO, number + 1)
            self._optimizer.update(number, self.gradient(members, number, scale), self._touched)
            updated[number] = members.op
            self._together.settle(me)

        self._finish(members, Word.DONE, work)

    def update_in_turn(self, members: Members, chunks: Sequence[int]) -> None:
        """Apply the step to all of this owner's chunks, in this order, each as soon as it has arrived. Nobody takes
        over."""
        for number in chunks:
            self._optimizer.update(number, self.gradient(members, number), self._touched)
            self._arena.updated[number] = members.op
        self._together.board.set(self._together.replica, Word.DONE, members.op)

    def gradient(self, members: Members, number: int, scale: float = 1.0) -> torch.Tensor:
        """The summed gradient of a chunk, for reading, until the next call; sums are at least fp32."""
        chunk = self._arena.layout.chunks[number]
        if self._arena.sums.numel():
            self._arrived(number)
            parts, weights = [self._arena.chunk_of(self._arena.sums, chunk)], None
        else:
            ranks = members.ranks if self._rows is None else self._rows[number]
            parts = [self._arena.chunk_of(self._arena.gradients[rank], chunk) for rank in ranks]
            weights = None if self._weights is None else [self._weights[rank] for rank in ranks]
        if len(parts) == 1 and scale == 1.0 and weights in (None, [1.0]):
            return parts[0]
        total = self._buffer[: chunk.bytes].view(chunk.dtype)
        sum_into(total, parts, weights)
        if scale != 1.0:
            total.mul_(scale)
        return total

    # ── deaths ───────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, members: Members, word: Word, work: Callable[[int], None]) -> None:
        """Do `work` on every chunk of this owner's shard; return when all members' shards are done."""

        def work_on_shard(rank: int) -> None:
            for number in self.chunks(rank):
                work(number)

        self._together.finish(
            members, word, Phase.AWAITING_UPDATES, work_on_shard, put_right=lambda: self._put_back(members)
        )

    def _put_back(self, members: Members) -> None:
        """Undo what dead owners had begun and not finished."""
        for dead, number in self._together.unfinished(members):
            if self._arena.updated[number] != members.op:
                parameters, block = self._bytes(number)
                kept_parameters, kept_block = self._arena.undo(dead, number)
                parameters.copy_(kept_parameters)
                block.copy_(kept_block)
            self._together.settle(dead)
        self._optimizer.forget()

    def _bytes(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        chunk = self._arena.layout.chunks[number]
        return self._arena.parameters[chunk.start : chunk.stop], self._arena.state_block(number)


def sum_into(total: torch.Tensor, parts: list[torch.Tensor], weights: Sequence[float] | None = None) -> None:
    """`total` = the sum of `parts` in order, each times its weight; 16-bit types are added up in fp32."""
    if weights is not None:
        wide = torch.empty_like(total, dtype=torch.float32) if total.dtype.itemsize < 4 else total
        torch.mul(parts[0], weights[0], out=wide)
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            wide.add_(part, alpha=weight)
        if wide is not total:
            total.copy_(wide)
    elif len(parts) == 1:
        total.copy_(parts[0])
    elif total.dtype.itemsize < 4 and len(parts) > 2:
        wide = parts[0].float()
        for part in parts[1:]:
            wide += part
        total.copy_(wide)
    else:
        torch.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total.add_(part)
