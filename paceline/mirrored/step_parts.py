"""What takes part in a step of mirrored replicas, one thing each, in the order of the engine's list.

begin ── forward, backward ── computed ── arrive ── agree ┃ decided ── norm ── update ── closed
                                                          ┃
         nothing has changed: a death here                ┃ all have arrived, on every host: the
         means that the step is tried again               ┃ step will be made, by whoever is left
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.exchange.members import Members
from paceline.mirrored.owner import Owner


@dataclass(frozen=True)
class DecidedStep:
    """A step at which all of a host have arrived."""

    members: Members
    number: int  # updates made before it
    touched: list[int]  # by slot: whether anybody has a gradient for it
    weights: dict[int, float] | None = None  # by rank: what its gradient counts; None: all are added as they are
    lets_in: bool = False  # hosts that are ready, when it is complete


class StepPart:
    """Something that takes part. This one does nothing."""

    def begin(self, members: Members, number: int) -> None:
        """A try of step `number` begins."""

    def computed(self, members: Members, number: int) -> None:
        """This replica's gradients are complete; it has not arrived yet."""

    def agree(self, step: DecidedStep) -> None:
        """All of this host have arrived: gets what it needs from other hosts. Where there are some, it may be called
        again for the same step."""

    def decided(self, step: DecidedStep) -> None:
        """The step will be made."""

    def squared_norm(self, step: DecidedStep) -> float:
        """Returns the squared length of the gradients that this part has."""
        return 0.0

    def update(self, step: DecidedStep, scale: float) -> None:
        """Makes the step with what this part has, gradients times `scale`."""

    def closed(self) -> None:
        """The step is complete."""

    def close(self) -> None:
        """Lets go of everything."""

    # ── whole tensors that nobody else has ───────────────────────────────────────────────────────────────

    def names(self) -> set[str]:
        """Returns the names of the parameters that lie with this part and nowhere else."""
        return set()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns their gradients of the last step."""
        return {}

    def read(self) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
        """Returns them, and their optimizer state."""
        return {}, {}

    def put(self, weights: dict[str, torch.Tensor], states: dict[str, dict[str, Any]]) -> None:
        """Takes them over, and their optimizer state."""


@dataclass(frozen=True)
class OwnShard(StepPart):
    """The shared memory of a host: every replica sums and updates its shard."""

    owner: Owner
    rows: Callable[[Members], dict[int, list[int]] | None]  # whose buffers have something, by slot; None: all may
    before_update: Callable[[Members], None]
    squared_norm_of_all: Callable[[DecidedStep, float], float]  # hosts, of which this one has its own
    update_shards: Callable[[Owner, DecidedStep, float], None]

    def begin(self, members: Members, number: int) -> None:
        self.owner.divide(members.ranks[: members.lanes])

    def decided(self, step: DecidedStep) -> None:
        self.owner.begin(step.touched, self.rows(step.members), step.weights)

    def squared_norm(self, step: DecidedStep) -> float:
        return self.squared_norm_of_all(step, self.owner.norm(step.members) ** 2)

    def update(self, step: DecidedStep, scale: float) -> None:
        self.before_update(step.members)
        self.update_shards(self.owner, step, scale)
