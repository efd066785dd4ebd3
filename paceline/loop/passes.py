"""Forward and backward over a replica's samples: one pass a micro-batch, checked and weighted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from paceline.errors import LossError
from paceline.split.cut import Check, Loss, train

Train = Callable[[Loss, nn.Module, Any, float, Check], float]


class MicroBatches(list[Any]):
    """This replica's part of a batch, cut for gradient accumulation. `Trainer.step` takes it as a whole."""


@dataclasses.dataclass(frozen=True)
class Passes:
    """How a script computes: its loss, in how many passes a batch, on which replica."""

    loss: Loss
    accumulate: int
    replica: int

    def run(
        self,
        model: nn.Module,
        micro_batches: Sequence[Any],
        sizes: Sequence[int],
        *,
        whole: int,
        number: int,
        seed: int | None,
        around: Callable[[int, bool], AbstractContextManager[None]],
        train: Train = train,
    ) -> float:
        """Forward and backward over every micro-batch that has samples; this replica's share of the mean loss over
        `whole` samples. `around(pass, is last)` goes around each. With `seed`, random numbers follow from it.
        `train`: how one pass is made; a cut model may do it in pieces."""
        passes = [k for k, size in enumerate(sizes) if size]
        total = 0.0
        model.train()
        outside = torch.get_rng_state() if seed is not None else None
        if seed is not None:
            _seed(seed)
        try:
            for k in passes:
                with around(k, k == passes[-1]):
                    check = partial(self._checked, number=number)
                    total += train(self.loss, model, micro_batches[k], sizes[k] / whole, check)
        finally:
            if outside is not None:
                torch.set_rng_state(outside)
        return total

    def _checked(self, loss: Any, number: int) -> float:
        where = f"at step {number} on replica {self.replica}"
        if not isinstance(loss, torch.Tensor):
            raise LossError("loss", type(loss).__name__, f"return a scalar tensor ({where})")
        if loss.numel() != 1:
            raise LossError("loss", f"a tensor of shape {tuple(loss.shape)}", f"return its mean, a scalar ({where})")
        value = float(loss.detach())
        if not math.isfinite(value):
            raise LossError("loss", value, f"it must be finite ({where}); lower the learning rate or look at the data")
        return value


def empty_like(batch: Any) -> Any:
    """The same kind of batch with no samples: for a replica that has none in a last, small batch."""
    return tree_map(lambda leaf: leaf[:0] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf, batch)


def _seed(seed: int) -> None:
    """`torch.manual_seed`, but without its notes to devices not in use, which take longer than a small step."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


# ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────

Metric = Callable[[nn.Module, Any], Any]


class Evaluation:
    """Sums a metric over samples: a number, or a dict of numbers."""

    def __init__(
        self, metric: Metric, model: nn.Module, load: Callable[[range], Any], length: int, at_once: int
    ) -> None:
        self._metric, self._model, self._load = metric, model, load
        self._length, self._at_once = length, at_once
        self._names: list[str | None] = []

    def call(self, model: nn.Module) -> None:
        """As it will be called, on one sample or a few."""
        self._metric(model, self._load(range(min(self._at_once, self._length))))

    def over(self, samples: range) -> torch.Tensor:
        """Sums of the metric's values over these samples, batch by batch."""
        sums: list[float] = []
        # One with no samples at all still has to know how many numbers the metric gives.
        for start in range(samples.start, samples.stop, self._at_once) or [0]:
            part = range(start, min(start + self._at_once, samples.stop) if samples else min(1, self._length))
            value = self._metric(self._model, self._load(part))
            named = value if isinstance(value, dict) else {None: value}
            if not sums:
                sums = [0.0] * len(named)
                self._names = list(named)
            for index, number in enumerate(named.values()):
                sums[index] += float(number) * (len(part) if samples else 0)
        return torch.tensor(sums, dtype=torch.float64)

    def mean(self, sums: torch.Tensor) -> Any:
        """What the user gets, from the sums over all samples."""
        if not self._names:  # others have measured all of it
            self.over(range(0))
        means = [float(total) / self._length for total in sums[: len(self._names)]]
        return means[0] if self._names == [None] else dict(zip(self._names, means, strict=True))
