"""A batch that was drawn and not yet trained on: what the user was given, and how an engine has it computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.data.ahead import Ahead, Request
from paceline.data.batch_values import without_samples
from paceline.errors import PacelineError
from paceline.loop.engine import Chapter, Computed, ReplicaWork, Samples, Worker
from paceline.loop.passes import Passes


class MicroBatches(list[Any]):
    """A replica's part of a batch, cut for gradient accumulation. `Trainer.step` takes it as a whole."""


class ReplicaBatches(list[Any]):
    """The batches of several replicas that are one process. `Trainer.step` takes it as a whole."""


class ReplicaBatch:
    """One replica's part of a batch."""

    def __init__(
        self,
        work: ReplicaWork,
        following: Sequence[Request],
        chapter: Chapter,
        samples: Samples,
        ahead: Ahead,
        passes: Passes,
    ) -> None:
        """`following`: what most likely comes next."""
        self.work = work
        self._samples, self._ahead, self._passes = samples, ahead, passes
        self._following = following
        self._changed = False  # by the user
        self.micro_batches = ahead.take(*work.request)
        self.given: Any = MicroBatches(self.micro_batches)
        if passes.accumulate == 1 and len(self.micro_batches) == 1:
            self.given = self.micro_batches[0] if work.samples else _empty_batch(chapter, work)

    def take(self, batch: Any) -> None:
        """The user trains on this, which may be another than was given."""
        if batch is not self.given:
            self.micro_batches = list(batch) if isinstance(self.given, MicroBatches) else [batch]
            self._changed = True

    def compute(self, worker: Worker, assignment: Any) -> Computed:
        """Runs forward and backward; with another assignment than that of `work`, on other samples."""
        if assignment != self.work.assignment:
            if self._changed:
                raise PacelineError(
                    "a replica died and its samples cannot be computed again, because the batch given to trainer.step "
                    "is not the one that trainer.batches yielded: transform it in the dataset or in the loss"
                )
            self.work = self._samples.work(assignment)
            self.micro_batches = self._ahead.take(*self.work.request)
        return Computed(self._passes.run(worker, self.work, self.micro_batches), self.work.samples)

    def coming(self) -> list[Any]:
        """Returns the micro-batches of what most likely follows, as far as they are loaded."""
        loaded = (batch for request in self._following for batch in self._ahead.peek(*request))
        return [batch for batch in loaded if batch is not None]


class DrawnBatch:
    """What the user has been given: the batch of every replica that this process is."""

    def __init__(self, works: list[ReplicaBatch]) -> None:
        self.batches = works
        self.given: Any = works[0].given if len(works) == 1 else ReplicaBatches(work.given for work in works)

    def take(self, batch: Any) -> None:
        """The user trains on this."""
        if batch is self.given:
            return
        own = list(batch) if isinstance(self.given, ReplicaBatches) else [batch]
        if len(own) != len(self.batches):
            raise PacelineError(
                f"trainer.step was given the batches of {len(own)} replicas instead of {len(self.batches)}: give all "
                "that trainer.batches yielded"
            )
        for replica, given in zip(self.batches, own, strict=True):
            replica.take(given)


def _empty_batch(chapter: Chapter, work: ReplicaWork) -> Any:
    """The same kind of batch with no samples: for a replica that has none in a last, small batch."""
    one = chapter.feed.load(chapter.ledger, work.epoch, range(work.first, work.first + 1))
    return without_samples(one)
