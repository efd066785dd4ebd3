"""How the replicas of a host come to share one model.

The first of them makes the arena and copies its parameters in; the others compare theirs with it, bit by bit, and
then let go of their own copy. A replica that was started again takes what it finds.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import ModelError, ReplicaDied
from paceline.exchange.members import MemberLost, Members
from paceline.exchange.together import Together
from paceline.exchange.words import Kind, Phase
from paceline.memory.layout import FlatLayout, aligned
from paceline.memory.model_arena import ForHosts, ModelArena, Sizes
from paceline.optim.model_in_arena import SMALLEST_SCRATCH_BYTES, ModelInArena
from paceline.optim.state import StateLayout
from paceline.torch_private import AnyBatchNorm


class SharedModel(ModelInArena):
    """A model that all replicas of a host share, with everything known that owners need."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        together: Together,
        *,
        for_hosts: Callable[[FlatLayout], ForHosts] = lambda _: ForHosts(),
        whole_tensors: bool = False,
        sparse: bool = False,
    ) -> None:
        """`for_hosts`: what is kept beside a model that lies so. `whole_tensors`: none is cut. `sparse`: not all of the
        arena will be used, so take what is, and no more."""
        board = together.board
        super().__init__(model, optimizer, board.replicas, whole_tensors=whole_tensors)
        # What the user's optimizer held before training, by slot:
        self.users_state = {
            number: dict(optimizer.state[parameter])
            for number, parameter in enumerate(self.parameters)
            if optimizer.state.get(parameter)
        }
        self.states = StateLayout(optimizer, self.layout, self.users_state)
        self._sizes = Sizes(
            replicas=board.replicas,
            state_blocks=tuple(self.states.block_bytes),
            scratch_bytes=_scratch_bytes(model),
            buffer_bytes=self.buffer_bytes,
            for_hosts=for_hosts(self.layout),
        )
        self._sparse = sparse
        self._together = together
        self._replica = together.replica

    def share(self) -> None:
        """Come to have an arena in common with the other replicas, which all call this."""
        number = self._together.board.next_arena(self._replica)
        if self._together.board.replicas == 1:
            self.fill(ModelArena.private(self.layout, self._sizes, self._device))
        else:
            self._together.attempt(lambda members: self._try_to_share(number, members), on_host=True)

    def join(self) -> None:
        """Take part in the arena of a run in progress."""
        board = self._together.board
        number = board.next_arena(self._replica)
        while not hasattr(self, "arena"):
            living = self._together.others_at_it()
            if not living:
                raise ReplicaDied(f"replica {self._replica} was started again, but nobody is left to join")
            with suppress(MemberLost):
                self._attach(number, living[0], compare=False)

    def _try_to_share(self, number: int, members: Members) -> None:
        board = self._together.board
        board.work_on(members, Kind.BUILD, Phase.STARTING)
        if not hasattr(self, "arena"):
            if members.first == self._replica and board.arena_holder(number) is None:
                self.fill(ModelArena.create(self.layout, self._sizes, sparse=self._sparse))
                board.hold_arena(self._replica, number, self.arena.arena.descriptor)
            else:
                self._attach(number, members.first, compare=True)
        self._together.arrive(members, Phase.AWAITING_ARENA)

    def _attach(self, number: int, maker: int, *, compare: bool) -> None:
        """Take part in the arena that a living replica holds, or that `maker` is about to make."""
        held = self._together.await_arena(number, maker)
        holder, arena = held[0], self._together.attach(*held)
        _compare_descriptions(self.layout.describe(), ModelArena.described(arena), self._replica, holder)
        self.arena = ModelArena(arena, self.layout, self._sizes)
        if compare:
            self.compare_values(f"{self._replica}", f"replica {holder}")
        self.point_to_arena()
        self._together.board.hold_arena(self._replica, number, arena.descriptor)

    def compare_hosts(self, total: Callable[[torch.Tensor], torch.Tensor], hosts: int) -> None:
        """All hosts must start from the same parameters, bit by bit; `total` is the sum over all of them."""
        slots = self.layout.slots
        checks = [zlib.crc32(_bytes(self.arena.parameter(slot))) for slot in slots]
        if total(torch.tensor([len(slots)])) != len(slots) * hosts:
            raise ModelError("model", f"{len(slots)} parameters", "another host has another number of them")
        totals = total(torch.tensor(checks, dtype=torch.int64)).tolist()
        for slot, check, found in zip(slots, checks, totals, strict=True):
            if found != check * hosts:
                raise ModelError(
                    "model",
                    slot.name,
                    "this parameter differs between hosts at the start; set the same seed in every process before the "
                    "model is made",
                )

    def fingerprint(self) -> int:
        """Returns a number that tells this model, with its optimizer, from others."""
        return zlib.crc32(f"{self.layout.describe()} {self._sizes}".encode())

    # ── buffers ─────────────────────────────────────────────────────────────────────────────────────────────

    def publish_buffers(self) -> None:
        for place, buffer in self.buffer_places():
            place.copy_(buffer)

    def take_buffers(self, total: Callable[[torch.Tensor], torch.Tensor] | None = None, *, first: bool = True) -> None:
        """What the first member has published; with the `total` over several hosts, that of the `first`."""
        for place, buffer in self.buffer_places():
            buffer.copy_(place)
            if total is not None:
                buffer.copy_(total(buffer if first else torch.zeros_like(buffer)))


def _scratch_bytes(model: nn.Module) -> int:
    """Room for the statistics of the widest BatchNorm: two sums and a count, in float64."""
    norms = [module for module in model.modules() if isinstance(module, AnyBatchNorm)]
    widest = max((module.num_features for module in norms), default=0)
    return max(SMALLEST_SCRATCH_BYTES, aligned((2 * widest + 1) * 8))


def _compare_descriptions(mine: list[list[Any]], theirs: list[list[Any]], replica: int, holder: int) -> None:
    if mine == theirs:
        return
    for own, other in zip(mine, theirs, strict=False):
        if own != other:
            raise ModelError(
                "model",
                own[0],
                f"replica {replica} has it as {own[1:3]} and replica {holder} has {other[0]!r} as {other[1:3]}; "
                "build the same model and optimizer in every process",
            )
    raise ModelError(
        "model",
        f"{len(mine)} parameters",
        f"replica {holder} has {len(theirs)}; build the same model in every process",
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    """Returns what a tensor is in memory: of some types numpy knows none."""
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
