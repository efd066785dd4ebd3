"""From a dataset to batches.

A ledger speaks of positions in an epoch; a feed turns positions into a collated batch. There are three kinds,
because there are three kinds of datasets:

    tensors      the rows are picked by one `index_select` a tensor, without a line of Python per sample
    map-style    `dataset[i]` for each index (or `dataset.__getitems__`), then collated; by worker processes if asked
    a stream     only `iter(dataset)`: every replica reads all of it and keeps what an uncommitted update may need

A stream cannot be asked for a sample again, but an update may have to be: when a replica dies, the survivors load
its part of the same lease. So samples stay buffered until the ledger has committed them. Every replica must see
the same stream: one that draws random numbers has to seed them itself, and one that was split by rank would lose
samples without a word. So the first sample is a part of what replicas compare.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline.data.batch_values import map_tensors, tensors_in
from paceline.data.collate import Collate, collate_samples
from paceline.data.ledger import Ledger
from paceline.data.script_call import checksum_of, describe
from paceline.data.workers import LONGEST_END_S, Workers, many_samples, note
from paceline.errors import DataError, PacelineError

Convert = Callable[[Any], Any]


class Feed(ABC):
    """Batches by position. May be used by several threads: one load at a time."""

    length: int | None  # None: a stream, which tells its length only by ending
    by_workers = False  # whether other processes load the samples

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.convert: Convert | None = None  # what a batch becomes before anybody sees it
        self.kind = ""  # of its dataset, in words

    def description(self) -> str:
        """Returns what its dataset is, as far as it can be compared with another replica's."""
        return self.kind

    def __enter__(self) -> Feed:
        """Starts what helps it to load."""
        return self

    def __exit__(self, *_: object) -> None:  # noqa: B027
        """Ends that."""

    def load(self, ledger: Ledger, epoch: int, positions: range) -> Any:
        """The collated batch of these positions, or None if there are none."""
        if not positions:
            return None
        with self._lock:
            batch = self._load(ledger, epoch, positions)
        return batch if self.convert is None else self.convert(batch)

    @abstractmethod
    def _load(self, ledger: Ledger, epoch: int, positions: range) -> Any: ...

    def available(self, ledger: Ledger, epoch: int, positions: range) -> int:
        """How many of these positions really exist, from the first one on. A stream reads on to find out."""
        assert self.length is not None
        return max(0, min(positions.stop, self.length) - positions.start)


class TensorFeed(Feed):
    """Rows of a tensor, or of all tensors in a tuple, a mapping or a dataclass: a batch is of the same class."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self.length = rows_of(tensors)
        self._tensors = tensors

    def _load(self, ledger: Ledger, epoch: int, positions: range) -> Any:
        indices = ledger.indices(epoch, positions)
        # Always a copy, even of neighbouring rows: a model may work in place on its input.
        return map_tensors(lambda tensor: tensor.index_select(0, indices.to(tensor.device)), self._tensors)


def rows_of(tensors: Any) -> int:
    """How many samples there are: rows, of which all of the tensors have as many."""
    shapes = [tuple(tensor.shape) for tensor in tensors_in(tensors) if tensor is not None]
    for shape in shapes:
        if not shape or shape[0] != shapes[0][0]:
            raise DataError(
                "shape of a tensor in the dataset",
                shape,
                f"give tensors of one first dimension, the number of samples (the first one has {shapes[0]})",
            )
    return int(shapes[0][0])


class _Rows:
    """The rows of tensors as a map-style dataset, for a `collate` of the user's own."""

    def __init__(self, tensors: Any) -> None:
        self._tensors, self._length = tensors, rows_of(tensors)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return map_tensors(lambda tensor: tensor[index], self._tensors)


class MapFeed(Feed):
    """Samples of a dataset with `len(dataset)` and `dataset[index]`."""

    def __init__(self, dataset: Any, collate: Collate | None, workers: Workers | None = None) -> None:
        super().__init__()
        self.length = len(dataset)
        self._dataset, self._collate, self._workers = dataset, collate or collate_samples, workers
        self.by_workers = workers is not None
        self._get_many = getattr(dataset, "__getitems__", None)

    def __enter__(self) -> Feed:
        if self._workers is not None:
            self._workers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._workers is not None:
            # A sample that nobody waits for any more, and that takes its time, must not hold up the end.
            if not self._lock.acquire(timeout=LONGEST_END_S):
                self._workers.kill()
                self._lock.acquire()
            self._workers.__exit__()
            self._lock.release()

    def _load(self, ledger: Ledger, epoch: int, positions: range) -> Any:
        if len(self._dataset) != self.length:
            raise DataError(
                "dataset length",
                len(self._dataset),
                f"it was {self.length} when training began, and must not change while it lasts",
            )
        indices = ledger.indices(epoch, positions).tolist()
        if self._workers is not None:
            found = self._workers.load(ledger.seed, epoch, indices)
            return found if self._workers.collates else self._collate(found)
        if self._get_many is not None:
            return self._collate(many_samples(self._get_many, indices))
        return self._collate([self._sample(index) for index in indices])

    def _sample(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except Exception as error:
            note(error, f"sample {index}")
            raise


class StreamFeed(Feed):
    """Samples of an iterable, in order of arrival; it is iterated anew for each epoch."""

    def __init__(self, stream: Iterable[Any], collate: Collate) -> None:
        super().__init__()
        self.length = None
        self._stream, self._collate = stream, collate
        self._readings: dict[int, _Reading] = {}
        self._begun: _Reading | None = None  # of no epoch yet: an iterable may count how often it is iterated

    def description(self) -> str:
        with self._lock:
            if self._begun is None and not self._readings:
                self._begun = _Reading(self._stream)
            reading = self._begun or min(self._readings.items())[1]
            with contextlib.suppress(Exception):  # whoever loads it will hear of that
                reading.read_to(1)
            first = reading.samples(range(1)) if not reading.start else []
        return f"{self.kind}, first sample {checksum_of(first[0]):08x}" if first else self.kind

    def _load(self, ledger: Ledger, epoch: int, positions: range) -> Any:
        reading, floor = self._reading(ledger, epoch)
        if positions.start < floor:
            raise PacelineError(
                f"position {positions.start} of epoch {epoch} cannot be loaded: "
                f"the samples before position {floor} are committed and forgotten"
            )
        # The other members' samples of the same batch have to be read past in any case: do it now, in the thread.
        batches = -(-(positions.stop - floor) // ledger.batch_size)
        reading.read_to(floor + batches * ledger.batch_size)
        if reading.stop < positions.stop:
            raise PacelineError(
                f"position {positions.stop - 1} of epoch {epoch} cannot be loaded: "
                f"the stream ended after {reading.stop} samples"
            )
        return self._collate(reading.samples(positions))

    def available(self, ledger: Ledger, epoch: int, positions: range) -> int:
        with self._lock:
            reading, _ = self._reading(ledger, epoch)
            reading.read_to(positions.stop)
            return max(0, min(positions.stop, reading.stop) - positions.start)

    def _reading(self, ledger: Ledger, epoch: int) -> tuple[_Reading, int]:
        """The reading of this epoch, and the first position of it that may still be asked for."""
        committed = ledger.next()
        if epoch < committed.epoch:
            raise PacelineError(f"epoch {epoch} cannot be loaded: the run is in epoch {committed.epoch}")
        self._readings = {key: old for key, old in self._readings.items() if key >= committed.epoch}
        floor = committed.start if epoch == committed.epoch else 0
        reading = self._readings.get(epoch)
        if reading is None or reading.start > floor:  # new, or the run resumed at an earlier position
            reading = self._readings[epoch] = self._begun or _Reading(self._stream)
            self._begun = None
        reading.forget_to(floor)
        if reading.start < floor:
            raise DataError(
                f"dataset length in epoch {epoch}",
                reading.start,
                f"{floor} samples of that epoch were used before, resume with the same stream",
            )
        return reading, floor


class _Reading:
    """One pass over a stream: the samples [start, stop) of it, which are read and not yet forgotten."""

    def __init__(self, stream: Iterable[Any]) -> None:
        self._iterator = iter(stream)
        self._buffer: deque[Any] = deque()
        self._failure: BaseException | None = None
        self._ended = False
        self.start = 0

    @property
    def stop(self) -> int:
        return self.start + len(self._buffer)

    def samples(self, positions: range) -> list[Any]:
        return list(islice(self._buffer, positions.start - self.start, positions.stop - self.start))

    def read_to(self, stop: int) -> None:
        while self.stop < stop and self._read_one():
            pass

    def forget_to(self, start: int) -> None:
        """Drop the samples before `start`, reading past those that were never read: nothing piles up."""
        while self.start < start and (self._buffer or self._read_one()):
            self._buffer.popleft()
            self.start += 1

    def _read_one(self) -> bool:
        if self._failure is not None:
            # A generator that raised only says StopIteration from then on. That must not pass for the end.
            raise self._failure
        if not self._ended:
            try:
                self._buffer.append(next(self._iterator))
            except StopIteration:
                self._ended = True
            except BaseException as failure:
                self._failure = failure
                raise
        return not self._ended


def open_feed(
    dataset: Any,
    collate: Collate | None = None,
    workers: int = 0,
    *,
    begin_worker: Callable[[int], None] | None = None,
    cores: Collection[int] = (),
    convert: Convert | None = None,
) -> Feed:
    """The feed for a dataset: tensors, map-style or a stream. `collate` makes a batch of a list of samples, and
    `convert` another of it; `workers` processes load them, see `Workers`."""
    feed = _feed_of(dataset, collate, Workers(dataset, collate, workers, begin=begin_worker, cores=cores))
    feed.convert = convert
    feed.kind = describe(dataset)
    return feed


def _feed_of(dataset: Any, collate: Collate | None, workers: Workers) -> Feed:
    kind = type(dataset).__name__
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
        dataset = dataset.tensors
    if _holds_tensors(dataset):
        if isinstance(dataset, list):
            dataset = tuple(dataset)
        return TensorFeed(dataset) if collate is None else MapFeed(_Rows(dataset), collate)
    if isinstance(dataset, (Mapping, str, bytes, DataLoader)):
        raise DataError("dataset", kind, "give tensors, a dataset with len() and [index], or an iterable")
    # torch gives every Dataset a __getitem__, streams too: only the class tells those apart.
    is_stream = isinstance(dataset, IterableDataset)
    if not is_stream and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return MapFeed(dataset, collate, workers if workers.count else None)
    if is_stream or hasattr(dataset, "__iter__"):
        if workers.count:
            raise DataError(
                "workers",
                workers.count,
                "a stream is read in order, by one; give 0, or a dataset with len() and [index]",
            )
        return StreamFeed(dataset, collate or collate_samples)
    raise DataError("dataset", kind, "give tensors, a dataset with len() and [index], or an iterable")


def _holds_tensors(dataset: Any) -> bool:
    """Whether a dataset is tensors with a row for each sample, and not a list of samples with tensors in them."""
    if isinstance(dataset, Tensor):
        return True
    if isinstance(dataset, (tuple, list)):
        items = list(dataset)
    elif isinstance(dataset, Mapping):
        items = list(dataset.values())
    else:
        items = []
    if not any(isinstance(item, (Tensor, np.ndarray)) for item in items):
        return False
    if not all(isinstance(item, Tensor) for item in items):
        raise DataError(
            "dataset",
            f"{type(dataset).__name__} of {', '.join(sorted({type(item).__name__ for item in items}))}",
            "give tensors only, torch.as_tensor makes them",
        )
    return True
