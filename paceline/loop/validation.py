"""The samples that a script evaluates its model on, and the metric, for whoever measures other models in its place.

A script is run as far as its evaluation, which ends it (`reached.py`); here its samples are opened, and the metric of
any model is computed as the script would have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from paceline.data import Ledger, open_feed
from paceline.errors import DataError, InvalidInput, LossError
from paceline.loop.evaluation import Metric
from paceline.loop.reached import EvaluationReached
from paceline.loop.returned_loss import read_number
from paceline.optim.models import evaluating

SampleMetric = tuple[float, float]
"""A sum, and its count."""


@dataclass
class ValidationSet:
    """The samples of an evaluation, how they are loaded, and by what a model is measured on them."""

    load: Callable[[range], Any]
    length: int
    at_once: int
    metric: Metric
    loss: Metric
    name: str
    wanted: str | None = None  # which of the numbers, if the metric gives several by name
    told: str = field(init=False)  # the metric's name

    def __post_init__(self) -> None:
        self.told = self.name

    @property
    def batches(self) -> list[range]:
        return [range(start, min(start + self.at_once, self.length)) for start in range(0, self.length, self.at_once)]

    def number(self, model: Any, batch: Any, size: int) -> SampleMetric:
        """Returns the metric of one batch, of so many samples."""
        with torch.no_grad():
            value = self.metric(model, batch)
        if isinstance(value, dict):
            value = self._picked(value)
        number, count = read_number("metric", value)
        return (number * size, float(size)) if count is None else (number, count)

    def measured(self, model: nn.Module) -> float:
        """Returns the metric of a model over all samples."""
        with evaluating(model):
            found = [self.number(model, self.load(samples), len(samples)) for samples in self.batches]
        value = mean_of(found)
        if not math.isfinite(value):
            raise LossError("metric", value, f"{self.told} must be finite to be compared")
        return value

    def _picked(self, numbers: dict[str, Any]) -> Any:
        """Returns the number that was asked for, of several."""
        names = {f"{self.name}/{key}": key for key in numbers}
        wanted = self.wanted if self.wanted is not None or len(names) > 1 else next(iter(names))
        if wanted not in names:
            raise InvalidInput("metric", wanted, f"the evaluation tells {', '.join(names)}, give one of them")
        self.told = str(wanted)
        return numbers[names[self.told]]


def mean_of(values: Sequence[SampleMetric]) -> float:
    """Returns the mean of sums and counts."""
    count = math.fsum(count for _, count in values)
    return math.fsum(total for total, _ in values) / count if count else math.nan


@contextmanager
def open_validation(reached: EvaluationReached, wanted: str | None, dataset: Any = None) -> Iterator[ValidationSet]:
    """Returns the set of a script that has come to its evaluation. `dataset`: in the place of the script's own."""
    data = reached.data
    given = data.dataset if dataset is None else dataset
    with open_feed(given, data.collate, data.workers or 0, begin_worker=data.begin_worker) as feed:
        if not feed.length:
            raise DataError("validation set", f"{feed.length} samples", "evaluate on one that has samples")
        ledger = Ledger(feed.length, reached.at_once, shuffle=False)
        load = lambda part: feed.load(ledger, 0, part)  # noqa: E731
        yield ValidationSet(load, feed.length, reached.at_once, reached.metric, reached.loss, reached.name, wanted)
