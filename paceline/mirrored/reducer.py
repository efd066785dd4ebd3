"""The mean of all replicas' gradients, in place in every replica's buffer: what `distribute` gives after backward.

Each owner sums its shard and writes the mean into all buffers, chunk by chunk. The mean overwrites what it was made
from, so the sum is first written down in the owner's undo space and noted on the board: whoever takes over from an
owner that was killed in between finds either all parts untouched, or the noted sum to write the mean from again.
"""

from __future__ import annotations

import torch

from paceline.exchange.host_sums import HostSums
from paceline.exchange.members import Members
from paceline.exchange.together import Together
from paceline.exchange.words import Phase, Word
from paceline.memory.layout import assign
from paceline.memory.model_arena import ModelArena
from paceline.mirrored.owner import sum_into


class MeanReducer:
    """One replica's part of reducing gradients in place."""

    def __init__(self, together: Together, arena: ModelArena, sums: HostSums | None = None, hosts: int = 1) -> None:
        """`sums`: over several hosts."""
        self._together = together
        self._arena = arena
        self._sums, self._hosts = sums, hosts
        self._ranks: tuple[int, ...] = ()
        self._shards: dict[int, list[tuple[int, list[torch.Tensor], torch.Tensor]]] = {}

    def reduce(self, members: Members) -> None:
        """All members' gradients are in their buffers; leaves the mean in each of them."""
        self._divide(members.ranks)
        self._together.finish(
            members,
            Word.NORMED,
            Phase.AWAITING_GRADIENTS,
            work=lambda rank: self._reduce_shard(members, rank),
            put_right=lambda: self._copy_again(members),
        )

    def _divide(self, ranks: tuple[int, ...]) -> None:
        """By owner: number of each of its chunks, the chunk in every buffer, and where this replica leaves the sum.
        Made once, because making a view takes longer than adding up a small chunk."""
        if ranks == self._ranks:
            return
        arena, me = self._arena, self._together.replica
        self._ranks = ranks
        for rank, shard in zip(ranks, assign(arena.layout.chunks, len(ranks)), strict=True):
            self._shards[rank] = []
            for number in (number for bucket in shard for number in bucket):
                chunk = arena.layout.chunks[number]
                parts = [arena.chunk_of(arena.gradients[other], chunk) for other in ranks]
                self._shards[rank].append((number, parts, arena.undo(me, number)[0].view(chunk.dtype)))

    def _reduce_shard(self, members: Members, rank: int) -> None:
        arena, me = self._arena, self._together.replica
        share = self._share(members)
        for number, parts, total in self._shards[rank]:
            if arena.reduced[number] == members.op:
                continue
            sum_into(total, parts)
            if self._sums is not None:
                self._sums.sum(number, total)
            self._together.board.set(me, Word.UNDO, number + 1)
            for part in parts:
                torch.mul(total, share, out=part)
            arena.reduced[number] = members.op
            self._together.settle(me)

    def _share(self, members: Members) -> float:
        """What one replica's gradient counts in the mean."""
        return 1.0 / (len(members.ranks) * self._hosts)

    def _copy_again(self, members: Members) -> None:
        arena = self._arena
        for dead, number in self._together.unfinished(members):
            chunk = arena.layout.chunks[number]
            total = arena.undo(dead, number)[0].view(chunk.dtype)
            for rank in members.ranks:
                torch.mul(total, self._share(members), out=arena.chunk_of(arena.gradients[rank], chunk))
            arena.reduced[number] = members.op
            self._together.settle(dead)
