"""Forward and backward over a replica's samples: one pass a micro-batch, checked and weighted."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.errors import LossError
from paceline.loop.engine import ReplicaWork, Worker
from paceline.loop.returned_loss import read_loss
from paceline.loss_value import NOTHING, FoundLoss, LossPart, SumUnit, Weight, words
from paceline.split.cut import Check, Loss, train


@dataclasses.dataclass
class PlainWorker:
    """A worker of plain torch."""

    model: nn.Module
    replica: int = 0

    def one_pass(self, work: ReplicaWork, number: int, batch: Any, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def train(self, loss: Loss, batch: Any, weight: Weight, check: Check) -> LossPart:
        return train(loss, self.model, batch, weight, check)


@dataclasses.dataclass
class Passes:
    """How a script computes: its loss, and in how many passes a batch."""

    loss: Loss
    accumulate: int
    slow: Mapping[int, float] = dataclasses.field(default_factory=dict)  # by replica: `--slow`
    _counted: bool | None = dataclasses.field(default=None, init=False)  # whether the loss is (sum, count), once known

    def run(self, worker: Worker, work: ReplicaWork, micro_batches: Sequence[Any]) -> LossPart:
        """Runs forward and backward over every micro-batch that has samples. Returns what this replica's loss is of the
        one over the whole batch."""
        passes = [number for number, samples in enumerate(work.ranges) if samples]
        check = partial(self._check, where=f"at step {work.step} on replica {worker.replica}")
        total, unit = NOTHING, SumUnit(work.samples, work.whole, work.unit)
        if not worker.model.training:  # else every module keeps its mode: some may be frozen
            worker.model.train()
        began = time.monotonic()
        outside = torch.get_rng_state() if work.seed is not None else None
        if work.seed is not None:
            _seed(work.seed)
        try:
            for number in passes:
                batch, weight = micro_batches[number], Weight(len(work.ranges[number]) / work.whole, unit)
                with worker.one_pass(work, number, batch, is_last=number == passes[-1]):
                    total = total + worker.train(self.loss, batch, weight, check)
        finally:
            if outside is not None:
                torch.set_rng_state(outside)
        if worker.replica in self.slow:
            # A straggler that was asked for. It sleeps: on a slow machine of its own it would not use our cores either.
            time.sleep((time.monotonic() - began) * (self.slow[worker.replica] - 1.0))
        return total

    def _check(self, returned: Any, where: str) -> FoundLoss:
        found = read_loss(returned, where)
        counted = found.count is not None
        if self._counted is None:
            self._counted = counted
        elif counted != self._counted:
            expected = f"it was {words(counted=self._counted)} before, return the same kind each time ({where})"
            raise LossError("loss", words(counted=counted), expected)
        return found


def _seed(seed: int) -> None:
    """`torch.manual_seed`, but without its notes to devices not in use, which take longer than a small step."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
