"""Hosts that exchange every few steps only: `--every 8`, for links that are slow beside what is computed.

In between each host makes steps of its own, with the gradients of its own replicas, its own optimizer state and its own
batch statistics; the replicas of a host still share everything. Then all hosts take the mean of what they have come to
(local SGD). What crosses the link is by how much each parameter has changed since the last exchange, coded by the wire:
an eighth of the bytes, and one wait instead of eight.

    host 0   ●──●──●──● … ●─┐      ┌─▶ ●──●──●──● …
    host 1   ●──●──●──● … ●─┴ mean ┴─▶ ●──●──●──● …

Samples are dealt as ever: `batch_size` is divided among the replicas of all hosts, and each step of a host uses its
part of the batch. After every call that is no step (an evaluation, a save, the end of `batches`) all hosts have the
same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.exchange.board import Board
from paceline.exchange.links import Links
from paceline.exchange.together import Together
from paceline.exchange.words import Kind, Phase
from paceline.memory.layout import Slot
from paceline.memory.model_arena import ModelArena
from paceline.mirrored.between_hosts import BetweenHosts, OneHost, StepTotals, weights_by_rank
from paceline.mirrored.owner import Owner
from paceline.mirrored.step_parts import DecidedStep


class LocalSteps(BetweenHosts):
    """Averages this owner's shard with the owners of the same shard elsewhere, after every few steps."""

    sums_gradients = False

    def __init__(self, together: Together, links: Links, every: int) -> None:
        super().__init__(together, links)
        self.landed = None  # nothing is sent while backward runs
        self._every = every
        self._made = 0  # steps since the last exchange
        self._common: dict[int, torch.Tensor] = {}  # by chunk of this shard: what all hosts had then

    def open(self, arena: ModelArena, owner: Owner, buffers: Sequence[torch.Tensor]) -> None:
        super().open(arena, owner, buffers)
        self._averaged = [buffer for buffer in buffers if buffer.is_floating_point()]

    def here(self, among: Sequence[int], count: int) -> tuple[list[int], int]:
        own = count // self.count
        first = self.number * own
        return [index - first for index in among if first <= index < first + own], own

    def weights(
        self, board: Board, ranks: Sequence[int], devices: int, here: StepTotals, everywhere: StepTotals
    ) -> dict[int, float] | None:
        """Gradients are of each replica's share of the whole batch: the mean over this host's samples is larger."""
        if everywhere.counted:
            return weights_by_rank(board, ranks, devices, here.counted) if here.counted else None
        return dict.fromkeys(ranks, everywhere.samples / here.samples) if here.samples else None

    def touched(self, here: torch.Tensor, everywhere: torch.Tensor) -> torch.Tensor:
        return here

    def gradient(self, step: DecidedStep, arena: ModelArena, slot: Slot) -> torch.Tensor:
        return OneHost.gradient(self, step, arena, slot)

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, members: object, number: int) -> None:
        if not self._common:
            for chunk in self._owner.chunks(self._together.replica):
                self._common[chunk] = self._values(chunk).clone()

    def computed(self, members: object, number: int) -> None:
        """It stays here."""

    def decided(self, step: DecidedStep) -> None:
        """Nobody else is asked."""

    def closed(self) -> None:
        self._made += 1
        if self._made == self._every:
            self.settle()

    def settle(self) -> None:
        """All hosts take the mean of what they have come to since they last did."""
        if not self._made:
            return
        self._made = 0
        board, row = self._together.board, self._together.replica
        board.enter(row, Phase.AWAITING_HOSTS)
        for number, common in self._common.items():
            values = self._values(number)
            change = values - common
            self._links.sum_values(number, change)
            common.add_(change, alpha=1 / self.count)
            values.copy_(common)
        for buffer in self._averaged:
            buffer.copy_(self._links.sum_in_turn(buffer) / self.count)
        self._links.commit()
        self._together.meet(Kind.UPDATE, Phase.AWAITING_HOSTS)  # nobody computes with parts of it

    def _values(self, number: int) -> torch.Tensor:
        return self._arena.chunk_of(self._arena.parameters, self._arena.layout.chunks[number])
