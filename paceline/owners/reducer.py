"""The mean of all replicas' gradients, in place in every replica's buffer: what `distribute` gives after backward.

Each owner sums its shard and writes the mean into all buffers, chunk by chunk. The mean overwrites what it was made
from, so it is first written down in the owner's undo space and noted on the board: whoever takes over from an
owner that was killed in between finds either all parts untouched, or the noted result to copy again.
"""

from __future__ import annotations

from paceline.exchange.board import Members, Phase, Word
from paceline.exchange.links import Links
from paceline.exchange.together import Together
from paceline.memory import ModelArena, assign
from paceline.owners.owner import sum_into


class MeanReducer:
    """One replica's part of reducing gradients in place."""

    def __init__(self, together: Together, arena: ModelArena, links: Links | None = None) -> None:
        self._together = together
        self._arena = arena
        self._links = links

    def reduce(self, members: Members) -> None:
        """All members' gradients are in their buffers; leaves the mean in each of them."""
        shards = dict(zip(members.ranks, assign(self._arena.layout.chunks, len(members.ranks)), strict=True))
        self._together.finish(
            members,
            Word.NORMED,
            Phase.AWAITING_GRADIENTS,
            work=lambda rank: self._reduce_shard(members, shards[rank]),
            put_right=lambda: self._copy_again(members),
        )

    def _reduce_shard(self, members: Members, shard: list[list[int]]) -> None:
        arena, me = self._arena, self._together.replica
        for number in (number for bucket in shard for number in bucket):
            if arena.reduced[number] == members.op:
                continue
            chunk = arena.layout.chunks[number]
            parts = [arena.chunk_of(arena.gradients[rank], chunk) for rank in members.ranks]
            mean = arena.undo(me, number)[0].view(chunk.dtype)
            sum_into(mean, parts)
            count = len(parts)
            if self._links is not None:
                self._links.sum_values(number, mean)
                count *= self._links.hosts
            mean.div_(count)
            self._together.board.set(me, Word.UNDO, number + 1)
            for part in parts:
                part.copy_(mean)
            arena.reduced[number] = members.op
            self._together.settle(me)

    def _copy_again(self, members: Members) -> None:
        arena = self._arena
        for dead, number in self._together.unfinished(members):
            chunk = arena.layout.chunks[number]
            mean = arena.undo(dead, number)[0].view(chunk.dtype)
            for rank in members.ranks:
                arena.chunk_of(arena.gradients[rank], chunk).copy_(mean)
            arena.reduced[number] = members.op
            self._together.settle(dead)
