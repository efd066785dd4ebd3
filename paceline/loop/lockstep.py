"""Runs in which all replicas take the same steps: one process, and mirrored replicas.

Every replica keeps a ledger of its own, and all stay equal. A replica's samples are a function of the ledger and of its
share, the n-th of so many, so when one dies the others get larger shares of the very same samples: `Together.attempt`
tries the step again, and `ReplicaBatch.compute` is given another share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.data.ahead import Request
from paceline.data.ledger import Lease, Ledger
from paceline.data.script_call import ScriptCall
from paceline.errors import PacelineError
from paceline.evaluations import EvaluationKey
from paceline.loop.engine import Chapter, Closed, ReplicaWork, ServersControl
from paceline.loop.run_state import RunState, StateByName
from paceline.loop.script_position import ScriptPosition
from paceline.seeds import mixed
from paceline.split.cut import Function


@dataclass(frozen=True)
class BatchShare:
    """A replica's place among those who take part in a try: the `index`-th of `count`."""

    index: int
    count: int


class LedgerSamples:
    """A chapter's samples, from a ledger that all replicas compute alike."""

    stopped = False  # whoever is asked to stop is told with a step

    def __init__(
        self, chapter: Chapter, share: Callable[[], BatchShare], at_end: Callable[[], None] = lambda: None
    ) -> None:
        """`at_end` is called when there are no more, by all replicas after the same step."""
        self._chapter = chapter
        self._share = share
        self._at_end = at_end
        self._lease = chapter.ledger.next()

    def next(self) -> Sequence[ReplicaWork]:
        ledger, feed = self._chapter.ledger, self._chapter.feed
        while (lease := ledger.next()).epoch < self._chapter.stop_epoch:
            available = feed.available(ledger, lease.epoch, range(lease.start, lease.stop))
            if available and not (ledger.drop_last and available < lease.size):
                self._lease = dataclasses.replace(lease, stop=lease.start + available)
                return [self.work(self._share())]
            ledger.end_epoch(lease.epoch)
        self._at_end()
        return []

    def work(self, assignment: BatchShare) -> ReplicaWork:
        return self._work(self._lease, assignment)

    def following(self, work: ReplicaWork) -> Sequence[Request]:
        return [self._work(self._chapter.ledger.peek(self._lease), work.assignment).request]

    def _work(self, lease: Lease, share: BatchShare) -> ReplicaWork:
        chapter, parts = self._chapter, lease.parts(share.count, self._chapter.accumulate)
        step = chapter.steps_before + lease.step
        return ReplicaWork(
            assignment=share,
            step=step,
            epoch=lease.epoch,
            ranges=tuple(parts[share.index]),
            first=lease.start,
            whole=lease.size,
            # A function of (seed, update, member): a step that is tried again after a death, or after a resume, draws
            # the same.
            seed=mixed(chapter.ledger.seed, step, share.index),
            unit=float(lease.size) if share.count > 1 else None,
            among=tuple(
                tuple(member for member in range(share.count) if parts[member][number])
                for number in range(chapter.accumulate)
            ),
        )

    def commit(self, closed: Closed) -> None:
        lease = self._lease
        if closed.samples != lease.size:
            raise PacelineError(f"{lease} was closed with {closed.samples} samples instead of {lease.size}")
        parts = lease.parts(closed.count, self._chapter.accumulate)
        self._chapter.ledger.commit(lease, [part for member in parts for part in member])

    def close(self) -> None:
        """Nothing was taken from anybody."""


class LockstepEngine:
    """What engines have in common whose replicas all take the same steps."""

    model: nn.Module
    in_step = True
    at_once = 1
    joining = False
    gradients_ready: Callable[[], None] | None = None
    state_for_joining: Callable[[], RunState]

    @property
    def servers(self) -> ServersControl | None:
        return None

    def share(self) -> BatchShare:
        """Returns this replica's share of the next step, if nobody dies before."""
        return BatchShare(0, 1)

    def steps(self, position: ScriptPosition) -> int:
        return position.steps

    def ledger(self, position: ScriptPosition) -> Ledger | None:
        return position.ledger

    def agree(self, call: ScriptCall) -> None:
        """Nobody else calls."""

    def samples(self, chapter: Chapter) -> LedgerSamples:
        return LedgerSamples(chapter, self.share)

    def expect(self, steps: int) -> None:
        """Nobody is looking."""

    def prepare(self, function: Function, given: Any) -> None:
        """The model is not cut."""

    def meet_devices(self) -> None:
        """There are no others."""

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        # It is whole in every process, and the next step waits for all of them.
        yield self.model

    def join(self) -> RunState:
        raise AssertionError("nobody is here to join")

    def rest(self) -> None:
        """It works only while it is called."""

    def total(self, key: EvaluationKey, call: ScriptCall, over: Callable[[range], torch.Tensor]) -> torch.Tensor:
        assert call.length is not None
        whole = Lease(0, 0, 0, call.length)
        return self.sum(call, lambda share: over(whole.parts(share.count)[share.index][0]))

    def sum(self, call: ScriptCall, compute: Callable[[BatchShare], torch.Tensor]) -> torch.Tensor:
        """Returns the sum over all members of what `compute` returns (a small float64 vector)."""
        return compute(BatchShare(0, 1))

    def model_state(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def optimizer_state(self) -> StateByName:
        raise NotImplementedError

    def kept_by_hosts(self) -> dict[str, torch.Tensor]:
        return {}

    def take_kept_by_hosts(self, saved: dict[str, torch.Tensor]) -> None:
        """There is one host."""

    def snapshot(self, state: RunState) -> tuple[dict[str, torch.Tensor], StateByName, RunState]:
        return self.model_state(), self.optimizer_state(), state
