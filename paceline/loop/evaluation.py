"""A metric over a dataset: sums by whoever computes which samples, and the mean that the user gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn

from paceline.data.script_call import ScriptCall
from paceline.evaluations import EvaluationKey, EvaluationResult
from paceline.loop.engine import Batch, Chapter

Metric = Callable[[nn.Module, Any], Any]


class Evaluation:
    """Sums a metric over samples: a number, or a dict of numbers."""

    def __init__(
        self, metric: Metric, model: nn.Module, load: Callable[[range], Any], script_call: ScriptCall, at_once: int
    ) -> None:
        assert script_call.length is not None
        self.script_call, self.length = script_call, script_call.length
        self._metric, self._model, self._load, self._at_once = metric, model, load, at_once
        self._names: list[Any] = []

    def call(self, model: nn.Module) -> None:
        """Calls the model as the metric does, on one sample or a few."""
        self._metric(model, self._load(range(min(self._at_once, self.length))))

    def over(self, samples: range) -> torch.Tensor:
        """Returns the sums of the metric's values over these samples, batch by batch."""
        sums: list[float] = []
        # One with no samples at all still has to know how many numbers the metric gives.
        for start in range(samples.start, samples.stop, self._at_once) or [0]:
            part = range(start, min(start + self._at_once, samples.stop) if samples else min(1, self.length))
            value = self._metric(self._model, self._load(part))
            named = value if isinstance(value, dict) else {None: value}
            if not sums:
                sums = [0.0] * len(named)
                self._names = list(named)
            for index, number in enumerate(named.values()):
                sums[index] += float(number) * (len(part) if samples else 0)
        return torch.tensor(sums, dtype=torch.float64)

    def result(self, key: EvaluationKey, sums: torch.Tensor) -> EvaluationResult:
        """Returns what is written down of it."""
        if not self._names:  # others have measured all of it
            self.over(range(0))
        names = [] if self._names == [None] else list(map(str, self._names))
        return EvaluationResult(key, sums[: len(self._names)].tolist(), names)

    def value(self, result: EvaluationResult) -> Any:
        """Returns what the user gets: the mean over all samples."""
        means = [total / self.length for total in result.sums]
        return dict(zip(result.names, means, strict=True)) if result.names else means[0]


class _InHand(Evaluation):
    """Sums a loss over a batch of which each replica has its own part."""

    def __init__(self, loss: Metric, model: nn.Module, batch: Batch, script_call: ScriptCall) -> None:
        self._ranges = batch.work.ranges
        super().__init__(loss, model, lambda part: batch.micro_batches[part.start], script_call, 1)

    def over(self, samples: range) -> torch.Tensor:
        """Returns the sum over this replica's own samples, whichever it was asked for."""
        self._names = [None]
        total = 0.0
        for number, part in enumerate(self._ranges):
            if part:
                total += float(self._metric(self._model, self._load(range(number, number + 1)))) * len(part)
        return torch.tensor([total], dtype=torch.float64)


def evaluation_of(loss: Metric, model: nn.Module, batch: Batch, chapter: Chapter, call: ScriptCall) -> Evaluation:
    """Returns how the loss is computed once more over all samples of a batch, by whoever computes which."""
    feed, ledger, work = chapter.feed, chapter.ledger, batch.work
    if feed.length is None:  # a stream has forgotten them: each replica has its part in hand
        return _InHand(loss, model, batch, msgspec.structs.replace(call, length=work.whole))
    start = work.first - work.first % ledger.batch_size  # with servers a replica knows only which part was its own
    whole = min(ledger.batch_size, feed.length - start)

    def load(part: range) -> Any:
        return feed.load(ledger, work.epoch, range(start + part.start, start + part.stop))

    return Evaluation(loss, model, load, msgspec.structs.replace(call, length=whole), -(-whole // chapter.accumulate))
