"""Forward and backward over a replica's samples: one pass a micro-batch, checked and weighted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.errors import LossError
from paceline.loop.engine import ReplicaWork, Worker
from paceline.split.cut import Check, Loss, train


@dataclasses.dataclass
class PlainWorker:
    """A worker of plain torch."""

    model: nn.Module
    replica: int = 0

    def one_pass(self, work: ReplicaWork, number: int, batch: Any, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def train(self, loss: Loss, batch: Any, weight: float, check: Check) -> float:
        return train(loss, self.model, batch, weight, check)


@dataclasses.dataclass(frozen=True)
class Passes:
    """How a script computes: its loss, and in how many passes a batch."""

    loss: Loss
    accumulate: int

    def run(self, worker: Worker, work: ReplicaWork, micro_batches: Sequence[Any]) -> float:
        """Runs forward and backward over every micro-batch that has samples. Returns this replica's share of the mean
        loss over the whole batch."""
        passes = [number for number, samples in enumerate(work.ranges) if samples]
        check = partial(_checked, where=f"at step {work.step} on replica {worker.replica}")
        total = 0.0
        if not worker.model.training:  # else every module keeps its mode: some may be frozen
            worker.model.train()
        outside = torch.get_rng_state() if work.seed is not None else None
        if work.seed is not None:
            _seed(work.seed)
        try:
            for number in passes:
                batch, weight = micro_batches[number], len(work.ranges[number]) / work.whole
                with worker.one_pass(work, number, batch, is_last=number == passes[-1]):
                    total += worker.train(self.loss, batch, weight, check)
        finally:
            if outside is not None:
                torch.set_rng_state(outside)
        return total


def _checked(loss: Any, where: str) -> float:
    if not isinstance(loss, torch.Tensor):
        raise LossError("loss", type(loss).__name__, f"return a scalar tensor ({where})")
    if loss.numel() != 1:
        raise LossError("loss", f"a tensor of shape {tuple(loss.shape)}", f"return its mean, a scalar ({where})")
    value = float(loss.detach())
    if not math.isfinite(value):
        raise LossError("loss", value, f"it must be finite ({where}); lower the learning rate or look at the data")
    return value


def _seed(seed: int) -> None:
    """`torch.manual_seed`, but without its notes to devices not in use, which take longer than a small step."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
