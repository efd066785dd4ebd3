"""What a replica's engine asks of the hosts of its run, and the answers where there is one host.

With several it is `BetweenHosts`, or one of those that step by themselves (`LocalSteps`, `Gossip`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch

from paceline.exchange.board import Board
from paceline.exchange.members import Members
from paceline.exchange.sums import SharedSums
from paceline.exchange.words import Kind, Word
from paceline.loop.lockstep import BatchShare
from paceline.memory.layout import FlatLayout, Slot
from paceline.memory.model_arena import ForHosts, ModelArena
from paceline.mirrored.owner import Owner
from paceline.mirrored.step_parts import DecidedStep, StepPart
from paceline.mirrored.step_totals import StepTotals

OptimizerStates = dict[int, dict[str, Any]]  # by slot


class OneHost(StepPart):
    """All replicas are on this host: nothing has to go anywhere."""

    number = 0  # of this host
    leads = True  # of those that take part it is the first: it saves, and others take its buffers
    several = False
    most = 1  # hosts that the run may have
    count = 1  # hosts that take part in the try
    total = 1  # of their members; only with several hosts
    before = 0  # members of the hosts before this one
    sums_gradients = False  # over hosts, in every step
    bucket_bytes: int | None = None
    landed: Callable[[int], None] | None = None  # to be told of every gradient that is complete

    overlaps = False  # updates of a step and whatever comes after it, until somebody needs a parameter
    on_touch: Callable[[], None] | None = None  # where they do: called when the script does before the next step

    whole_tensors = False  # no tensor may be cut
    has_all = True  # parameters are all updated on this host
    apart = False  # since then: other hosts have newer values of some, until they `settle`

    def keeps(self, layout: FlatLayout) -> ForHosts:
        """Returns what hosts keep beside a model that lies so."""
        return ForHosts()

    def open(self, arena: ModelArena, owner: Owner, sums: SharedSums, buffers: Sequence[torch.Tensor]) -> None:
        """The gradients lie there, and are this owner's to sum; `buffers` are this process's own."""

    def enter(self, members: Members) -> None:
        """A try of an op begins in which hosts exchange something."""

    def decide(self, members: Members) -> None:
        """Returns when all hosts have all that they need to complete this try."""

    def arrived(self, chunk: int) -> None:
        """Returns when a chunk of this owner's is summed over all hosts."""

    def collect(self, *, first: bool) -> dict[str, torch.Tensor]:
        """Returns what hosts keep for a checkpoint; all processes call this, and the `first` of host 0 gets it."""
        return {}

    def states(self, own: Callable[[], OptimizerStates]) -> OptimizerStates:
        """Returns the optimizer state that lies on other hosts only, to whoever saves; all processes call this."""
        return {}

    def newest(self) -> dict[str, torch.Tensor]:
        """Returns what other hosts have newer values of, by name, to one process alone."""
        return {}

    def gradients_elsewhere(self) -> dict[int, torch.Tensor]:
        """Returns by slot the gradients that lie on other hosts only, after `meet`, to whoever records them."""
        return {}

    def divided(self, users: Callable[[str], Set[int]], buffers: Sequence[tuple[str, torch.Tensor]]) -> None:
        """The model is cut: which devices of a replica compute with a tensor, and where buffers lie in the arena."""

    def take(self, saved: dict[str, torch.Tensor]) -> None:
        """Goes on from what a checkpoint has; one process of each host calls this."""

    def bring(self, state: Callable[[], Sequence[torch.Tensor]], *, needs: bool) -> None:
        """Hosts that join get the run's state, which lies in `state`; the first member of each host calls this."""

    def here(self, among: Sequence[int], count: int) -> tuple[Sequence[int], int]:
        """Returns which of `among`, of `count` members, share batch statistics with this host, and of how many."""
        return among, count

    def weights(
        self, board: Board, ranks: Sequence[int], devices: int, here: StepTotals, everywhere: StepTotals
    ) -> dict[int, float] | None:
        """Returns by rank what its gradient counts when this host's owners add up; None: all are added as they are."""
        return weights_by_rank(board, ranks, devices, here.counted) if here.counted else None

    def touched(self, here: torch.Tensor, hosts: torch.Tensor) -> torch.Tensor:
        """Returns by slot whether it is updated here, where gradients are for it `here`, and on so many `hosts`."""
        return hosts > 0

    def squared_norm_of_all(self, step: DecidedStep, own: float) -> float:
        """Returns the squared length of the gradients that hosts update with, of which this one has its `own`."""
        return own

    def update_shards(self, owner: Owner, step: DecidedStep, scale: float) -> None:
        """Has this owner update its shard, and returns when all shards of this host are; where updates overlap with
        what comes after a step, at once."""
        owner.update(step.members, scale)

    def complete(self) -> None:
        """Returns when all shards of this host are updated."""

    def begin_backward(self) -> None:
        """The first forward of a try is over, and the step before is complete."""

    def settle(self) -> bool:
        """Returns when all hosts have the same parameters, as they do after every step: whether that changed them."""
        return False

    def share(self, members: Members, index: int, count: int) -> BatchShare:
        """Returns the share of this host's `index`-th of `count` replicas, in a try of these members."""
        return BatchShare(index, count)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all hosts of a few numbers."""
        return values

    def sum_in_call(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the same in what is no step."""
        return values

    def begin_call(self, kind: Kind) -> None:
        """Returns when all hosts have begun a call of this kind, which is no step."""

    def meet(self) -> None:
        """Returns when what this host's owners have sent is back, summed over all hosts."""

    def gradient(self, step: DecidedStep, arena: ModelArena, slot: Slot) -> torch.Tensor:
        """Returns the gradient of a slot, summed over all replicas."""
        parts = [arena.gradient(rank, slot) for rank in step.members.ranks]
        if step.weights is not None:
            parts = [part * step.weights[rank] for part, rank in zip(parts, step.members.ranks, strict=True)]
        return torch.stack(parts).sum(0)


def weights_by_rank(board: Board, ranks: Sequence[int], devices: int, total: float) -> dict[int, float]:
    """Returns by rank what its gradient counts in the mean over that total; one device of a replica knows."""
    units: dict[int, float] = {}
    for rank in ranks:
        units[rank // devices] = max(units.get(rank // devices, 0.0), board.get_float(rank, Word.UNIT))
    return {rank: units[rank // devices] / total for rank in ranks}
