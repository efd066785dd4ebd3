"""A metric over a dataset: sums by whoever computes which samples, and the mean that the user gets."""

from __future__ import annotations

import zlib
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
CHECKS = 5  # numbers in front of the sums, by which is seen whether all have measured the same
AS_MANY_AS = 32  # numbers are added up at least, so that those of different metrics are equally many


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
        self.sums: torch.Tensor | None = None  # over all samples, if they have been added up already
        self._names: list[Any] = []
        self._counted: list[bool] = []  # by name: whether the metric counts itself what it is a mean over

    def over(self, samples: range) -> torch.Tensor:
        """Returns the sums of the metric's values over these samples, batch by batch, and then the counts of those that
        have one; before them some numbers that tell whether all replicas have measured the same."""
        if self.sums is not None:
            return self.sums
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
            elif list(named) != self._names:
                raise _other_names(self._names, list(named))
            for index, (number, count) in enumerate(found):
                if (count is not None) != self._counted[index]:
                    raise _other_kind(self._names[index], counted=count is not None)
                if count is None:
                    sums[index] += number * (len(part) if samples else 0)
                elif samples:
                    sums[index] += number
                    counts[index] += count
        return self._summed([*sums, *(count for count, counted in zip(counts, self._counted, strict=True) if counted)])

    def _summed(self, numbers: list[float]) -> torch.Tensor:
        """Returns these numbers as they are added up: behind some that tell whether all have measured the same."""
        check = [1.0, *(value for half in self._checks() for value in (half, half * half))]
        room = AS_MANY_AS - len(check) - len(numbers)  # of another metric there may be more
        return torch.tensor([*check, *numbers, *[0.0] * room], dtype=torch.float64)

    def _checks(self) -> tuple[int, int]:
        """Returns a hash of what the metric returns, in two parts that are small enough for sums of their squares."""
        hashed = zlib.crc32(self._returns().encode())
        return hashed >> 16, hashed & 0xFFFF

    def _returns(self) -> str:
        """Returns what the metric returns, in words."""
        kinds = (
            f"{'a number' if name is None else name}{' as (sum, count)' * counted}"
            for name, counted in zip(self._names, self._counted, strict=True)
        )
        return ", ".join(kinds)

    def result(self, key: EvaluationKey, sums: torch.Tensor) -> EvaluationResult:
        """Returns what is written down of it."""
        if not self._names:  # others have measured all of it
            self.over(range(0))
        parts, *checks = sums[:CHECKS].tolist()
        if checks != [parts * value for half in self._checks() for value in (half, half * half)]:
            expected = (
                "that is what it returns here, and on another replica it returns something else; give all the same"
            )
            raise LossError("metric", self._returns(), expected)
        names = [] if self._names == [None] else list(map(str, self._names))
        counted = [index for index, counts in enumerate(self._counted) if counts]
        return EvaluationResult(key, sums[CHECKS:].tolist(), names, counted)

    def value(self, result: EvaluationResult) -> Any:
        """Returns what the user gets: the mean over all samples, or over what the metric counts."""
        size, sums = max(1, len(result.names or ())), result.sums
        counts = dict(zip(result.counted, sums[size : size + len(result.counted)], strict=True))
        means = [
            MeanPart(total, counts[index]).mean if index in counts else total / self.length
            for index, total in enumerate(sums[:size])
        ]
        return dict(zip(result.names, means, strict=True)) if result.names else means[0]


def as_added_up(result: EvaluationResult) -> list[float]:
    """Returns the sums of a result as a chief has them, behind numbers by which nobody disagrees."""
    return result.sums if result.names is None else [*[0.0] * CHECKS, *result.sums]


def _other_names(before: list[Any], now: list[Any]) -> LossError:
    first, then = (", ".join("a number" if name is None else str(name) for name in names) for names in (before, now))
    expected = f"of the batch before it was {first}, return the same names in the same order for every batch"
    return LossError("metric", then or "an empty dict", expected)


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
        assert total.count is not None
        return self._summed([total.total, total.count])


def evaluation_of(
    loss: Metric, compute: Callable[[Metric, Any], Any], batch: Batch, chapter: Chapter, call: ScriptCall
) -> Evaluation:
    """Returns how the loss is computed once more over all samples of a batch, by whoever computes which."""
    feed, work = chapter.feed, batch.work

    def alone(model: nn.Module, micro_batch: Any) -> Any:
        returned = loss(model, micro_batch)
        return returned[LOSS] if isinstance(returned, Mapping) else returned

    if feed.length is None:  # a stream has forgotten them: each replica has its part in hand
        return _InHand(alone, compute, batch, msgspec.structs.replace(call, length=work.whole))
    load, whole = batch_loader(batch, chapter)
    return Evaluation(
        alone, compute, load, msgspec.structs.replace(call, length=whole), -(-whole // chapter.accumulate)
    )


def batch_loader(batch: Batch, chapter: Chapter) -> tuple[Callable[[range], Any], int]:
    """Returns what loads samples of a batch, whoever has trained on them, and how many it has."""
    feed, ledger, work = chapter.feed, chapter.ledger, batch.work
    assert feed.length is not None
    start = work.first - work.first % ledger.batch_size  # with servers a replica knows only which part was its own

    def load(part: range) -> Any:
        return feed.load(ledger, work.epoch, range(start + part.start, start + part.stop))

    return load, min(ledger.batch_size, feed.length - start)
