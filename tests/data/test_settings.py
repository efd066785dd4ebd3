"""A DataLoader's settings are taken over, or refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline.data.settings import DataSettings, settle
from paceline.errors import DataError

DATASET: Dataset[Any] = TensorDataset(torch.arange(10))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


def begin(number: int) -> None: ...


def test_what_is_no_loader_is_as_it_was_asked_for() -> None:
    asked = DataSettings(DATASET, 4, workers=2)
    assert settle(asked) is asked


def test_the_settings_of_a_loader_hold_where_nothing_else_is_said() -> None:
    loader = DataLoader(DATASET, 4, shuffle=True, drop_last=True, num_workers=2, worker_init_fn=begin)
    assert settle(DataSettings(loader)) == DataSettings(DATASET, 4, True, True, None, 2, begin)
    loader = DataLoader(DATASET, 4, collate_fn=list)
    assert settle(DataSettings(loader, 4, False)) == DataSettings(DATASET, 4, False, False, list, 0, None)
    stream = Stream()
    assert settle(DataSettings(DataLoader(stream, 4))) == DataSettings(stream, 4, None, False, None, 0, None)
    assert settle(DataSettings(DataLoader(DATASET, 4), collate=list)).collate is list


@pytest.mark.parametrize(
    ("loader", "sentence"),
    [
        (
            lambda: DataLoader(DATASET, 4, sampler=WeightedRandomSampler([1.0] * 10, 10)),
            "DataLoader is 'one with a WeightedRandomSampler of its own': leave it out: every sample counts once an "
            "epoch, in an order that follows from seed and shuffle",
        ),
        (
            lambda: DataLoader(DATASET, 4, sampler=RandomSampler(TensorDataset(torch.arange(5)))),
            "DataLoader is 'one with a RandomSampler of its own': leave it out",
        ),
        (
            lambda: DataLoader(DATASET, 4, sampler=RandomSampler(TensorDataset(), replacement=True, num_samples=10)),
            "DataLoader is 'one with a RandomSampler of its own': leave it out",
        ),
        (
            lambda: DataLoader(DATASET, batch_sampler=BatchSampler(SequentialSampler(range(10)), 2, False)),
            "DataLoader is 'one whose batches are made by a BatchSampler': give the dataset inside it, or a loader "
            "with a batch_size",
        ),
        (
            lambda: DataLoader(DATASET, None),
            "DataLoader is 'one whose batches are made by its dataset': give the dataset inside it, or a loader",
        ),
        (
            lambda: DataLoader(DATASET, 4, shuffle=True, generator=torch.Generator()),
            "DataLoader is 'one with a generator': leave it out, the order follows from trainer.batches(seed=…)",
        ),
        (lambda: Own(DATASET, 4), "DataLoader is 'a Own with an __iter__ of its own': give the dataset inside it"),
        (lambda: DataLoader(DATASET, 8), "batch_size is 4: that of the DataLoader is 8, give the same or leave it out"),
    ],
)
def test_what_cannot_be_honoured_is_refused(loader: Callable[[], DataLoader[Any]], sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        settle(DataSettings(loader(), 4))
    assert str(caught.value).startswith(sentence)
