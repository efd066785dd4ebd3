"""A metric over a dataset: sums by whoever computes which samples, and the mean that the user gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import nn

from paceline.data.script_call import ScriptCall
from paceline.errors import LossError
from paceline.evaluations import EvaluationKey, EvaluationResult
from paceline.loop.engine import Batch, Chapter
from paceline.loop.returned_loss import LOSS, read_number
from paceline.loss_value import MeanPart, words

Metric = Callable[[nn.Module, Any], Any]


class Evaluation:
    """Sums a metric over samples: a number, a sum and its count, or a dict of these."""

    def __init__(
        self,
        metric: Metric,
        compute: Callable[[Metric, Any], Any],
        load: Callable[[range], Any],
        script_call: ScriptCall,
        at_once: int,
    ) -> None:
        """`compute(metric, batch)` computes it, with the model."""
        assert script_call.length is not None
        self.script_call, self.length = script_call, script_call.length
        self._metric, self._compute, self._load, self._at_once = metric, compute, load, at_once
        self._names: list[Any] = []
        self._counted: list[bool] = []  # by name: whether the metric counts itself what it is a mean over

    def over(self, samples: range) -> torch.Tensor:
        """Returns the sums of the metric's values over these samples, batch by batch; and then the counts of those that
        have one."""
        sums: list[float] = []
        counts: list[float] = []
        # One with no samples at all still has to know how many numbers the metric gives.
        for start in range(samples.start, samples.stop, self._at_once) or [0]:
            part = range(start, min(start + self._at_once, samples.stop) if samples else min(1, self.length))
            value = self._compute(self._metric, self._load(part))
            named = value if isinstance(value, dict) else {None: value}
            found = [read_number("metric" if name is None else f"metric {name}", it) for name, it in named.items()]
            if not sums:
                sums, counts = [0.0] * len(found), [0.0] * len(found)
                self._names, self._counted = list(named), [count is not None for _, count in found]
            for index, (number, count) in enumerate(found):
                if (count is not None) != self._counted[index]:
                    raise _other_kind(self._names[index], counted=count is not None)
                if count is None:
                    sums[index] += number * (len(part) if samples else 0)
                elif samples:
                    sums[index] += number
                    counts[index] += count
        of_counted = [count for count, counted in zip(counts, self._counted, strict=True) if counted]
        return torch.tensor([*sums, *of_counted], dtype=torch.float64)

    def result(self, key: EvaluationKey, sums: torch.Tensor) -> EvaluationResult:
        """Returns what is written down of it."""
        if not self._names:  # others have measured all of it
            self.over(range(0))
        names = [] if self._names == [None] else list(map(str, self._names))
        counted = [index for index, counts in enumerate(self._counted) if counts]
        return EvaluationResult(key, sums[: len(self._names) + len(counted)].tolist(), names, counted)

    def value(self, result: EvaluationResult) -> Any:
        """Returns what the user gets: the mean over all samples, or over what the metric counts."""
        size = len(result.sums) - len(result.counted)
        counts = dict(zip(result.counted, result.sums[size:], strict=True))
        means = [
            MeanPart(total, counts[index]).mean if index in counts else total / self.length
            for index, total in enumerate(result.sums[:size])
        ]
        return dict(zip(result.names, means, strict=True)) if result.names else means[0]


def _other_kind(name: Any, *, counted: bool) -> LossError:
    field = "metric" if name is None else f"metric {name}"
    return LossError(field, words(counted=counted), f"it was {words(counted=not counted)} before, return the same kind")


class _InHand(Evaluation):
    """Sums a loss over a batch of which each replica has its own part. A mean over samples is one over their count: a
    replica that has none cannot know which of both it is."""

    def __init__(
        self, loss: Metric, compute: Callable[[Metric, Any], Any], batch: Batch, script_call: ScriptCall
    ) -> None:
        self._ranges = batch.work.ranges
        super().__init__(loss, compute, lambda part: batch.micro_batches[part.start], script_call, 1)

    def over(self, samples: range) -> torch.Tensor:
        """Returns the sum over this replica's own samples, whichever it was asked for, and the count."""
        self._names, self._counted = [None], [True]
        total = MeanPart(0.0, 0.0)
        for number, part in enumerate(self._ranges):
            if part:
                value, count = read_number("loss", self._compute(self._metric, self._load(range(number, number + 1))))
                total += MeanPart(value * len(part), len(part)) if count is None else MeanPart(value, count)
        return torch.tensor([total.total, total.count], dtype=torch.float64)


def evaluation_of(
    loss: Metric, compute: Callable[[Metric, Any], Any], batch: Batch, chapter: Chapter, call: ScriptCall
) -> Evaluation:
    """Returns how the loss is computed once more over all samples of a batch, by whoever computes which."""
    feed, ledger, work = chapter.feed, chapter.ledger, batch.work

    def alone(model: nn.Module, micro_batch: Any) -> Any:
        returned = loss(model, micro_batch)
        return returned[LOSS] if isinstance(returned, Mapping) else returned

    if feed.length is None:  # a stream has forgotten them: each replica has its part in hand
        return _InHand(alone, compute, batch, msgspec.structs.replace(call, length=work.whole))
    start = work.first - work.first % ledger.batch_size  # with servers a replica knows only which part was its own
    whole = min(ledger.batch_size, feed.length - start)

    def load(part: range) -> Any:
        return feed.load(ledger, work.epoch, range(start + part.start, start + part.stop))

    return Evaluation(
        alone, compute, load, msgspec.structs.replace(call, length=whole), -(-whole // chapter.accumulate)
    )
