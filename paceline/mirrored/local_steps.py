"""Hosts that exchange every few steps only: `--every 8`, for links that are slow beside what is computed.

In between each host makes steps of its own, with the gradients of its own replicas, its own optimizer state and its own
batch statistics; the replicas of a host still share everything. Then all hosts take the mean of what they have come to
(local SGD). What crosses the link is by how much each parameter has changed since the last exchange, coded by the wire:
an eighth of the bytes, and one wait instead of eight.

    host 0   ●──●──●──● … ●─┐      ┌─▶ ●──●──●──● …
    host 1   ●──●──●──● … ●─┴ mean ┴─▶ ●──●──●──● …

With `--outer-momentum` and `--outer-lr` the mean change is not where hosts go on from, but the gradient of an outer
step with momentum (Nesterov's, as in DiLoCo), which all make alike.

Samples are dealt as ever: `batch_size` is divided among the replicas of all hosts, and each step of a host uses its
part of the batch. After every call that is no step (an evaluation, a save, the end of `batches`), and after a step at
which the run stops, all hosts have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.exchange.board import Board
from paceline.exchange.members import Members
from paceline.exchange.sums import SharedSums
from paceline.exchange.together import Together
from paceline.exchange.words import Kind, Phase
from paceline.memory.layout import FlatLayout, Slot
from paceline.memory.model_arena import ForHosts, ModelArena
from paceline.mirrored.between_hosts import BetweenHosts
from paceline.mirrored.link_maker import LinkMaker
from paceline.mirrored.one_host import OneHost, weights_by_rank
from paceline.mirrored.owner import Owner
from paceline.mirrored.step_parts import DecidedStep
from paceline.mirrored.step_totals import StepTotals


class LocalSteps(BetweenHosts):
    """Averages this owner's shard with the owners of the same shard elsewhere, after every few steps."""

    sums_gradients = False

    def __init__(
        self,
        together: Together,
        links: LinkMaker,
        wire_name: str,
        every: int,
        outer: tuple[float, float] | None = None,
    ) -> None:
        """`outer`: learning rate and momentum of the step whose gradient is the mean change; None: that is taken."""
        super().__init__(together, links, wire_name, of="change")
        self.landed = None  # nothing is sent while backward runs
        self._every, self._outer = every, outer
        self._made = 0  # steps since the last exchange
        self._begun = False

    def keeps(self, layout: FlatLayout) -> ForHosts:
        owed, _ = self._memory.floats(layout)
        return ForHosts(owed_floats=owed, common=True, outer=self._outer is not None)

    def open(self, arena: ModelArena, owner: Owner, sums: SharedSums, buffers: Sequence[torch.Tensor]) -> None:
        super().open(arena, owner, sums, buffers)
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

    def touched(self, here: torch.Tensor, hosts: torch.Tensor) -> torch.Tensor:
        return here

    def gradient(self, step: DecidedStep, arena: ModelArena, slot: Slot) -> torch.Tensor:
        return OneHost.gradient(self, step, arena, slot)

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, members: Members, number: int) -> None:
        self.enter(members)
        if not self._begun:  # all hosts have the same parameters
            for chunk in self._own_chunks():
                self._part(self._arena.common, chunk).copy_(self._values(chunk))
            self._begun = True

    def computed(self, members: object, number: int) -> None:
        """It stays here."""

    def agree(self, step: DecidedStep) -> None:
        """Nobody else is asked."""

    def decide(self, members: Members) -> None:
        """Nor whether the step is made: between hosts that step by themselves no death is survived."""

    def closed(self) -> None:
        self._made += 1
        if self._made == self._every:
            self.settle()

    def settle(self) -> bool:
        """All hosts take the mean of what they have come to since they last did, or make a step of it."""
        if not self._made:
            return False
        self._made = 0
        with self._not_tried_again("taking the mean with the other hosts"):
            self._for_all_chunks(self._settle)
            self._average_buffers()
        self._memory.commit()
        self._together.meet(Kind.UPDATE, Phase.AWAITING_HOSTS)  # nobody computes with parts of it
        return True

    def _average_buffers(self) -> None:
        assert self._links is not None
        for buffer in self._averaged:
            buffer.copy_(self._links.sum_in_turn(buffer) / self.count)

    def _settle(self, chunk: int) -> None:
        values, common = self._values(chunk), self._part(self._arena.common, chunk)
        change = values - common
        self._memory.sum(chunk, change)
        if self._outer is None:
            common.add_(change, alpha=1 / self.count)
        else:
            rate, momentum = self._outer
            velocity = self._part(self._arena.outer, chunk)
            velocity.mul_(momentum).add_(change, alpha=1 / self.count)
            common.add_(change, alpha=rate / self.count).add_(velocity, alpha=rate * momentum)
        values.copy_(common)

    def _for_all_chunks(self, work: Callable[[int], None]) -> None:
        """Several at once: one is coded while the bytes of others cross."""
        self._await(*[self._threads.submit(work, chunk) for chunk in self._own_chunks()])

    def _own_chunks(self) -> list[int]:
        return self._owner.chunks(self._together.replica)

    def _values(self, chunk: int) -> torch.Tensor:
        return self._part(self._arena.parameters, chunk)

    def _part(self, flat: torch.Tensor, chunk: int) -> torch.Tensor:
        return self._arena.chunk_of(flat, self._arena.layout.chunks[chunk])

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────

    def collect(self, *, first: bool) -> dict[str, torch.Tensor]:
        kept = super().collect(first=first)
        if first and self.leads:
            kept |= {f"outer/{slot.name}": self._arena.outer_step(slot) for slot in self._outer_slots()}
        return kept

    def take(self, saved: dict[str, torch.Tensor]) -> None:
        super().take(saved)
        for slot in self._outer_slots():
            if (velocity := saved.get(f"outer/{slot.name}")) is not None:
                self._arena.outer_step(slot).copy_(velocity)

    def _outer_slots(self) -> list[Slot]:
        if self._outer is None:
            return []
        return [slot for slot in self._arena.layout.slots if slot.group is not None]
