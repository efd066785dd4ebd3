"""What a trainer needs of whoever turns gradients into new parameters.

`Solo` (one process, plain torch) and `MirroredEngine` are engines; so will be whatever comes. A trainer hands over
*what* to compute, as a function of the members of the step, because a death may make the engine ask for it again
with fewer members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline.split.cut import Cut, Example


@dataclass(frozen=True)
class Share:
    """This replica's place among those who take part in a try: the `index`-th of `count`."""

    index: int
    count: int


@dataclass(frozen=True)
class Computed:
    """A replica's part of a step: its share of the mean loss, over how many samples."""

    loss: float
    samples: int


@dataclass(frozen=True)
class Closed:
    """A closed step: the mean loss over the batch, its samples, the members, whether to stop after it."""

    loss: float
    samples: int
    count: int
    stop: bool = False


StateByName = dict[str, dict[str, Any]]


class Engine(Protocol):
    """Closes steps, adds up evaluations, and knows the training state as whole tensors."""

    joining: bool  # this process was started again, and has yet to join the run in progress
    notes_for_joining: Callable[[], dict[str, Any]]  # what the trainer tells one that joins
    cut: Cut | None  # what this process does of a replica that several devices are
    gradients_ready: Callable[[], None] | None  # called on the chief when a step's gradients are complete

    @property
    def chief(self) -> bool:
        """Whether this replica writes files and speaks for the others."""

    def share(self) -> Share:
        """This replica's share of the next step, if nobody dies before."""

    def expect(self, steps: int) -> None:
        """How many steps the run will have, for the display."""

    def prepare(self, example: Example) -> None:
        """Cut the model, before anything is computed with it."""

    def join(self) -> dict[str, Any]:
        """Take part in the run in progress; returns the notes of its last step."""

    def one_pass(self, *, is_last: bool, among: Sequence[int]) -> AbstractContextManager[None]:
        """Around one forward and backward. `is_last`: of this replica's in this step; `among`: the indices of all
        members that make this pass, i.e. have samples in this micro-batch."""

    def step(self, number: int, compute: Callable[[Share], Computed], clip_norm: float | None) -> Closed:
        """Step `number`: compute, exchange, update. After a death `compute` is called again with another share."""

    def total(self, compute: Callable[[Share], torch.Tensor]) -> torch.Tensor:
        """The sum over all members of what `compute` returns (a small float64 vector)."""

    def once(self, act: Callable[[], None]) -> None:
        """The chief acts; everybody returns when that is done."""

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of the step that is being closed, by parameter name."""

    def optimizer_state(self) -> StateByName:
        """Whole-tensor optimizer state, by parameter name."""

    def model_state(self) -> dict[str, torch.Tensor]:
        """The model's own state_dict."""

    def take_state(self, model: dict[str, torch.Tensor], optimizer: StateByName) -> None:
        """Take over parameters, buffers and optimizer state, e.g. from a checkpoint."""

    def close(self) -> None:
        """Let go of everything shared."""
