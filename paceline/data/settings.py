"""What a script asks of its data: by arguments, or by a `torch.utils.data.DataLoader` that it has already.

A DataLoader is a dataset and settings: how many samples make a batch, in what order, by which processes, collated how.
Here an update's samples are worked out before they are loaded, and divided among replicas: so the loader itself is not
iterated, and its settings are taken over. Those that leave that to somebody else, a sampler of the user's own say, are
refused; those about speed alone (pin_memory, prefetch_factor, persistent_workers, timeout …) have no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, default_collate

from paceline.data.collate import Collate
from paceline.errors import DataError

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class DataSettings:
    """A dataset and how it is read; None: not said."""

    dataset: Any
    batch_size: int | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    collate: Collate | None = None
    workers: int | None = None
    begin_worker: Callable[[int], None] | None = None


def settle(asked: DataSettings) -> DataSettings:
    """Returns what was asked for, together with the settings of a DataLoader if that is what the dataset is."""
    loader = asked.dataset
    if not isinstance(loader, DataLoader):
        return asked
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise _refused(f"a {type(loader).__name__} with an __iter__ of its own", "give the dataset inside it")
    if loader.batch_sampler is None or loader.batch_size is None:
        made_by = "its dataset" if loader.batch_sampler is None else f"a {type(loader.batch_sampler).__name__}"
        raise _refused(
            f"one whose batches are made by {made_by}", "give the dataset inside it, or a loader with a batch_size"
        )
    if loader.generator is not None:
        raise _refused("one with a generator", "leave it out, the order follows from trainer.batches(seed=…)")
    collate = None if loader.collate_fn is default_collate else loader.collate_fn
    return DataSettings(
        loader.dataset,
        _one("batch_size", asked.batch_size, loader.batch_size),
        _one("shuffle", asked.shuffle, _shuffles(loader)),
        _one("drop_last", asked.drop_last, bool(loader.drop_last)),
        _one("collate", asked.collate, collate),
        _one("workers", asked.workers, int(loader.num_workers)),
        loader.worker_init_fn,
    )


def _shuffles(loader: DataLoader[Any]) -> bool | None:
    if isinstance(loader.dataset, IterableDataset):
        return None
    sampler: Any = loader.sampler
    dataset: Any = loader.dataset
    if type(sampler) is SequentialSampler and sampler.data_source is dataset:
        return False
    if type(sampler) is RandomSampler and sampler.data_source is dataset and sampler.generator is None:
        every_one_once = not sampler.replacement and len(sampler) == len(sampler.data_source)
        if every_one_once:
            return True
    raise _refused(
        f"one with a {type(sampler).__name__} of its own",
        "leave it out: every sample counts once an epoch, in an order that follows from seed and shuffle",
    )


def _one(field: str, asked: _Value | None, loaders: _Value | None) -> _Value | None:
    if asked is not None and loaders is not None and asked != loaders:
        raise DataError(field, asked, f"that of the DataLoader is {loaders!r}, give the same or leave it out")
    return loaders if asked is None else asked


def _refused(what: str, instead: str) -> DataError:
    return DataError("DataLoader", what, instead)
