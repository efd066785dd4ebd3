"""What the training loop needs of whoever makes its steps, and of whoever says which samples go into them.

An *engine* turns gradients into new parameters: `Solo` in one process, mirrored replicas, replicas with servers. It is
handed batches that it can have computed, again and with other samples if another replica dies meanwhile.

*Samples* come from one of two sources: a ledger that all replicas compute alike, or tickets of a chief. Each engine
opens the one it works with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from paceline.data.ahead import Request
from paceline.data.feed import Feed
from paceline.data.ledger import Ledger
from paceline.data.script_call import ScriptCall
from paceline.evaluations import EvaluationKey
from paceline.findings import ServersAccount
from paceline.loop.run_state import RunState, StateByName
from paceline.loop.script_position import ScriptPosition
from paceline.loss_value import LossPart, Weight
from paceline.rules import Rule
from paceline.split.cut import Check, Function, Loss

# ── what is computed ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Chapter:
    """Epochs of one dataset, as a script has asked for them."""

    number: int
    feed: Feed
    ledger: Ledger
    stop_epoch: int
    steps_before: int  # updates of the run before the ledger's first
    accumulate: int  # passes a batch

    @property
    def expected_steps(self) -> int:
        """Updates of the whole run when this is done."""
        ledger = self.ledger
        assert ledger.length is not None
        whole, rest = divmod(ledger.length, ledger.batch_size)
        an_epoch = whole + (1 if rest and not ledger.drop_last else 0)
        done_of_this = -(-ledger.position // ledger.batch_size)
        left = max(0, self.stop_epoch - ledger.epoch) * an_epoch - done_of_this
        return self.steps_before + ledger.step + left


@dataclass(frozen=True)
class ReplicaWork:
    """What one replica computes of a step."""

    assignment: Any  # as its engine knows it: a share of the batch, or a ticket
    step: int  # updates made before it
    epoch: int
    ranges: tuple[range, ...]  # the samples of each pass, by their position in the epoch's order
    first: int  # position of the batch's first sample, whoever has it
    whole: int  # samples over which the step's loss is a mean
    seed: int | None  # of the random numbers that are drawn in it; None: they go on as they are
    unit: float | None = None  # of sums (`loss_value.py`), where all replicas must have the same
    among: tuple[tuple[int, ...], ...] = ()  # by pass: the members of the step that have samples in it

    @property
    def request(self) -> Request:
        """How a feed is asked for it."""
        return self.epoch, self.ranges

    @property
    def samples(self) -> int:
        return sum(map(len, self.ranges))


@dataclass(frozen=True)
class Computed:
    """A replica's part of a step: of its loss, over how many samples."""

    loss: LossPart
    samples: int


@dataclass(frozen=True)
class Closed:
    """A closed step: the mean loss over the batch, its samples, the members, whether to stop after it."""

    loss: float
    samples: int
    count: int
    stop: bool = False
    logged: dict[str, float] = field(default_factory=dict)  # means of what the loss logs beside itself


class Samples(Protocol):
    """Where the samples of one chapter come from."""

    stopped: bool  # there is no more work because the run was asked to stop

    def next(self) -> Sequence[ReplicaWork]:
        """Returns the work of the next step, of every replica that this process is; none if there is no more."""

    def work(self, assignment: Any) -> ReplicaWork:
        """Returns what another assignment for the step in hand means: a replica has died meanwhile."""

    def following(self, work: ReplicaWork) -> Sequence[Request]:
        """Returns what most likely comes after `work`, to be loaded ahead."""

    def commit(self, closed: Closed) -> None:
        """Counts the samples of the step in hand: it was made."""

    def close(self) -> None:
        """Lets go of what was not computed."""


class Batch(Protocol):
    """What an engine does with a replica's part of a step."""

    work: ReplicaWork
    micro_batches: list[Any]

    def compute(self, worker: Worker, assignment: Any) -> Computed:
        """Runs forward and backward; with another assignment than that of `work`, on other samples."""

    def coming(self) -> list[Any]:
        """Returns the micro-batches of what most likely follows, as far as they are loaded."""


class Worker(Protocol):
    """Who computes: one replica's model, and what goes around each pass over it."""

    model: nn.Module
    replica: int

    def one_pass(self, work: ReplicaWork, number: int, batch: Any, *, is_last: bool) -> AbstractContextManager[None]:
        """Goes around forward and backward of pass `number`; `is_last`: of this replica's in this step."""

    def train(self, loss: Loss, batch: Any, weight: Weight, check: Check) -> LossPart:
        """Runs forward and backward of a pass, as `Cut.train` does."""


# ── who makes steps ──────────────────────────────────────────────────────────────────────────────────────────


class ServersControl(Protocol):
    """What a script may ask of servers, and tell them."""

    rule: Rule

    @property
    def accepting(self) -> int:
        """How many gradients make a step now."""

    @property
    def staleness(self) -> dict[int, int]:
        """How many gradients had which staleness."""

    def account(self) -> ServersAccount:
        """Returns the same, and how many gradients were thrown away."""


class Engine(Protocol):
    """Makes steps, adds up evaluations, and knows the training state as whole tensors."""

    joining: bool  # this process was started again, and has yet to join the run in progress
    state_for_joining: Callable[[], RunState]  # what the loop tells one that joins
    gradients_ready: Callable[[], None] | None  # called on the one in charge when a step's gradients are complete
    in_step: bool  # all replicas are at the same place of the script
    at_once: int  # replicas that this process is

    @property
    def servers(self) -> ServersControl | None:
        """The servers that own the parameters, if any do."""

    @property
    def in_charge(self) -> bool:
        """Whether this process prints, logs and writes files for all."""

    def steps(self, position: ScriptPosition) -> int:
        """Returns the updates of the whole run so far."""

    def ledger(self, position: ScriptPosition) -> Ledger | None:
        """Returns the ledger with all that was counted."""

    def agree(self, call: ScriptCall) -> None:
        """Has every process of the run that calls `batches` raise if another one has called it with something else."""

    def samples(self, chapter: Chapter) -> Samples:
        """Opens the source of a chapter's samples."""

    def expect(self, steps: int) -> None:
        """Shows how many steps the run will have."""

    def prepare(self, function: Function, given: Any) -> None:
        """Cuts the model, if it is to be, before the first step; `function(model, given)` is what will be computed."""

    def compute(self, function: Function, given: Any) -> Any:
        """Returns `function(model, given)`; all devices of a cut model compute it together."""

    def meet_devices(self) -> None:
        """Returns when all devices of a cut model are about to `compute`; raises if one does something else instead."""

    def whole_model(self) -> AbstractContextManager[nn.Module]:
        """Gives the script's model, whole and with the parameters as they are now, to this process alone: nobody else
        has to call it, and nobody changes the model inside."""

    def join(self) -> RunState:
        """Takes part in the run in progress; returns its state at its last step."""

    def step(self, batches: Sequence[Batch]) -> Closed:
        """Makes a step: compute, exchange, update."""

    def rest(self) -> None:
        """Returns when nothing is computed in the background."""

    def total(self, key: EvaluationKey, call: ScriptCall, over: Callable[[range], torch.Tensor]) -> torch.Tensor:
        """Returns the sum over all samples of what `over` returns for some of them, whoever computes which. Raises if
        another process has made another `call`."""

    def once(self, number: int, act: Callable[[], None]) -> None:
        """Has one process act; everybody returns when that is done. `number`: of this act in the script."""

    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns the gradients of the step that is being closed, by parameter name."""

    def optimizer_state(self) -> StateByName:
        """Returns whole-tensor optimizer state, by parameter name."""

    def model_state(self) -> dict[str, torch.Tensor]:
        """Returns the model's own state_dict."""

    def snapshot(self, state: RunState) -> tuple[dict[str, torch.Tensor], StateByName, RunState]:
        """Returns the model's state_dict, the optimizer's state and the run's, all after the same step."""

    def take_state(self, model: dict[str, torch.Tensor], optimizer: StateByName, state: RunState) -> None:
        """Takes over parameters, buffers, optimizer state and progress of a checkpoint."""

    def kept_by_hosts(self) -> dict[str, torch.Tensor]:
        """Returns what several hosts keep in order to exchange, for the checkpoint that is being written."""

    def take_kept_by_hosts(self, saved: dict[str, torch.Tensor]) -> None:
        """Goes on from what a checkpoint has of that, if this run has several hosts."""

    def close(self) -> None:
        """Lets go of everything shared."""
