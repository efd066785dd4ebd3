"""Which samples go into which update, and the proof that each counts once.

An epoch is one order of the dataset, drawn from (seed, epoch). An update leases the next `batch_size` positions of
that order, the members of the run divide the lease among themselves, and the update commits together with the
positions that really went into it:

    epoch 0 │  lease 0  │  lease 1  │           lease 2           │ lease 3  │ epoch 1 │ lease 4 │ …
            ╰────── committed ──────┴─────────── next() ──────────┴─ peek() ─╯
                                    │   member 0   │   member 1   │

Nothing here communicates. Every replica keeps a ledger of its own, and all of them stay equal because each answer
is a function of (seed, epoch, position, number of members) alone. So a death needs no hand-over of samples: the
survivors divide the same lease by one member less. A lease that did not commit is simply the next one again.

Positions, not sample indices, are what is written down: a whole epoch is then one range, however large.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from paceline.errors import CheckpointError, DataError, PacelineError


@dataclass(frozen=True)
class Lease:
    """The samples of one update: positions [start, stop) in the order of `epoch`.

    >>> Lease(step=0, epoch=0, start=0, stop=5).parts(members=2, micro_batches=2)
    [[range(0, 2), range(3, 4)], [range(2, 3), range(4, 5)]]
    """

    step: int  # number of the update, counted from 0 over the whole run
    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def parts(self, members: int, micro_batches: int = 1) -> list[list[range]]:
        """The positions that member m computes in micro-batch k, as `parts[m][k]`.

        Together they tile the lease. Sizes differ by at most one within a micro-batch, so a batch smaller than the
        number of members leaves some ranges empty.
        """
        runs = [_cut(run, members) for run in _cut(range(self.start, self.stop), micro_batches)]
        return [[run[member] for run in runs] for member in range(members)]

    def __str__(self) -> str:
        return f"update {self.step} ({_span(self.start, self.stop)} of epoch {self.epoch})"


class LedgerPlace(NamedTuple):
    """Where a run stands: the next update is `step`, and begins at `position` of `epoch`."""

    step: int
    epoch: int
    position: int


Count = Annotated[int, msgspec.Meta(ge=0)]
Row = Annotated[list[Count], msgspec.Meta(min_length=3, max_length=3)]  # epoch, start, stop


class LedgerState(msgspec.Struct):
    """A ledger as a checkpoint holds it."""

    seed: int
    length: int | None
    batch_size: int
    shuffle: bool
    drop_last: bool
    step: Count
    epoch: Count
    position: Count
    committed: list[Row]
    dropped: list[Row]


class Ledger:
    """The order of the samples, the lease of each update, and the record of what has been used.

    `length=None` is a stream of unknown length: positions are in order of arrival, nothing is shuffled, a lease
    may be committed with fewer samples than it asked for, and the caller says when an epoch has ended.

    >>> ledger = Ledger(10, batch_size=4)
    >>> for _ in range(4):
    ...     lease = ledger.next()
    ...     ledger.commit(lease, [part for member in lease.parts(members=3) for part in member])
    >>> ledger.check()
    'epoch 0: 10 samples, each once; epoch 1: 4 of 10 so far, each once'
    """

    def __init__(
        self,
        length: int | None,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise DataError("batch_size", batch_size, "give a whole number of samples from 1 up")
        if length is not None and length < 1:
            raise DataError("dataset length", length, "give a dataset of at least one sample")
        if length is not None and drop_last and batch_size > length:
            raise DataError(
                "batch_size", batch_size, f"with drop_last give at most the {length} samples of the dataset"
            )
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.shuffle = shuffle and length is not None
        self.drop_last = drop_last
        # One value, replaced as a whole: the prefetching thread reads it while the training thread commits.
        self._place = LedgerPlace(step=0, epoch=0, position=0)
        self._committed: dict[int, list[range]] = {}
        self._dropped: dict[int, list[range]] = {}
        self._orders: dict[int, Tensor] = {}

    @property
    def step(self) -> int:
        return self._place.step

    @property
    def epoch(self) -> int:
        return self._place.epoch

    @property
    def position(self) -> int:
        return self._place.position

    def next(self) -> Lease:
        """The lease of the next update. Asking changes nothing."""
        return self._lease(*self._place)

    def peek(self, lease: Lease) -> Lease:
        """The lease that follows `lease` once that is committed."""
        return self._lease(lease.step + 1, lease.epoch, lease.stop)

    def _lease(self, step: int, epoch: int, position: int) -> Lease:
        stop = position + self.batch_size
        if self.length is not None:
            position = self._after_counted(epoch, position)
            stop = position + self.batch_size
            if position >= self.length or (self.drop_last and stop > self.length):
                epoch, position = epoch + 1, self._after_counted(epoch + 1, 0)
                stop = position + self.batch_size
            # A run whose samples were counted out of order (by servers) may have counted the next ones before.
            ahead = [run.start for run in self._committed.get(epoch, []) if run.start > position]
            stop = min(stop, self.length, *ahead)
        return Lease(step, epoch, position, stop)

    def _after_counted(self, epoch: int, position: int) -> int:
        """The first position from this one on that has not been counted."""
        for run in sorted(self._committed.get(epoch, []), key=lambda run: run.start):
            if run.start <= position < run.stop:
                position = run.stop
        return position

    def indices(self, epoch: int, positions: range) -> Tensor:
        """The dataset indices at these positions of the epoch's order."""
        if self.length is not None and positions.stop > self.length:
            raise PacelineError(
                f"{_span(positions.start, positions.stop)} of epoch {epoch} cannot be read: "
                f"the dataset has {self.length} samples"
            )
        if not self.shuffle:
            return torch.arange(positions.start, positions.stop, device="cpu")
        return self._order(epoch)[positions.start : positions.stop]

    def _order(self, epoch: int) -> Tensor:
        order = self._orders.get(epoch)
        if order is None:
            assert self.length is not None
            generator = torch.Generator().manual_seed(_mixed(self.seed, epoch))
            order = torch.randperm(self.length, generator=generator, device="cpu")
            # Prefetching crosses from one epoch to the next, so two orders are kept. The dict is replaced, never
            # changed, because the prefetching thread reads it as well.
            self._orders = dict([*list(self._orders.items())[-1:], (epoch, order)])
        return order

    def commit(self, lease: Lease, parts: Sequence[range]) -> None:
        """Count the samples of an update that has just been applied; `parts` are the ranges that went into it."""
        expected = self.next()
        if self.length is None and 0 < lease.size <= expected.size:
            expected = Lease(expected.step, expected.epoch, expected.start, lease.stop)
        if lease != expected:
            raise PacelineError(f"{lease} cannot be committed: the next one is {expected}")
        if fault := _miscounted(range(lease.start, lease.stop), parts):
            raise PacelineError(f"{lease} cannot be committed: {fault}")
        _append(self._committed, lease.epoch, range(lease.start, lease.stop))
        self._move(LedgerPlace(lease.step + 1, lease.epoch, lease.stop))

    def commit_samples(self, samples: int) -> None:
        """Count the next update, made by others, which had this many samples."""
        lease = replace(self.next(), stop=self.next().start + samples)
        self.commit(lease, [range(lease.start, lease.stop)])

    def settle(self, step: int, rows: Iterable[Sequence[int]]) -> None:
        """Take over what somebody else has counted: `step` updates, and rows of epoch, start, stop in any order."""
        self._committed, self._dropped = _by_epoch(rows), {}
        self._place = self._first_gap(step)

    def _first_gap(self, step: int) -> LedgerPlace:
        """The first position that has not been counted; further ones may have been."""
        assert self.length is not None
        used = self.length - (self.length % self.batch_size if self.drop_last else 0)
        epoch = 0
        while True:
            position = 0
            for run in sorted(self._committed.get(epoch, []), key=lambda run: run.start):
                if run.start > position:
                    break
                position = run.stop
            if position < used:
                return LedgerPlace(step, epoch, position)
            if used < self.length:
                self._dropped[epoch] = [range(used, self.length)]
            epoch += 1

    def _move(self, place: LedgerPlace) -> None:
        following = self._lease(*place)
        if self.length is not None and following.epoch > place.epoch and place.position < self.length:
            _append(self._dropped, place.epoch, range(place.position, self.length))
        self._place = LedgerPlace(following.step, following.epoch, following.start)

    def take_batch_size(self, batch_size: int) -> None:
        """Lease so many from now on."""
        self.batch_size = batch_size
        self._move(self._place)  # with drop_last, the rest of the epoch may be too small now

    def end_epoch(self, epoch: int) -> None:
        """The stream ran out: the next update begins with the first sample of `epoch + 1`."""
        if self.length is not None or epoch != self.epoch:
            raise PacelineError(f"epoch {epoch} cannot be ended: only epoch {self.epoch} could, and only of a stream")
        if self.position == 0:
            raise DataError(
                f"number of batches in epoch {epoch}",
                0,
                "give a stream with at least one batch each time it is iterated, "
                "not a generator, which runs out after its first epoch",
            )
        self._place = LedgerPlace(self.step, epoch + 1, 0)

    def counts(self, epoch: int) -> Tensor:
        """How often each sample of the dataset was counted in this epoch so far, by sample index."""
        ranges = self._committed.get(epoch, [])
        length = self.length if self.length is not None else max((run.stop for run in ranges), default=0)
        counts = torch.zeros(length, dtype=torch.int64, device="cpu")
        for run in ranges:
            counts[self.indices(epoch, run)] += 1
        return counts

    def check(self) -> str:
        """The proof, as a sentence, that every sample was counted once; raises where it was not."""
        return _proof(self.length, self._place, self._committed, self._dropped)

    @classmethod
    def like(cls, state: LedgerState) -> Ledger:
        """A ledger at its beginning, of the same dataset and order."""
        options = {"seed": state.seed, "shuffle": state.shuffle, "drop_last": state.drop_last}
        return cls(state.length, state.batch_size, **options)  # type: ignore[arg-type]

    def record(self) -> LedgerState:
        """Everything needed to go on from here in another process."""
        return LedgerState(
            seed=self.seed,
            length=self.length,
            batch_size=self.batch_size,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            **self._place._asdict(),
            committed=_flat(self._committed),
            dropped=_flat(self._dropped),
        )

    def state(self) -> dict[str, Any]:
        """The same, ready for JSON."""
        builtins: dict[str, Any] = msgspec.to_builtins(self.record())
        return builtins

    def load(self, state: LedgerState | dict[str, Any]) -> None:
        """Go on where `state` was taken, with this ledger's own batch size."""
        try:
            saved = msgspec.convert(state, LedgerState)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"the ledger in the checkpoint is damaged: {error}") from error
        if saved.length != self.length:
            made_with = "a stream" if saved.length is None else f"{saved.length} samples"
            raise DataError(
                "dataset length",
                self.length,
                f"the checkpoint was made with {made_with}, resume with the same dataset",
            )
        for field in ("seed", "shuffle"):
            before, now = getattr(saved, field), getattr(self, field)
            if before != now:
                raise DataError(field, now, f"the checkpoint was made with {field}={before!r}, resume with the same")
        place = LedgerPlace(saved.step, saved.epoch, saved.position)
        committed, dropped = _by_epoch(saved.committed), _by_epoch(saved.dropped)
        try:
            _proof(self.length, place, committed, dropped)
        except PacelineError as error:
            raise CheckpointError(f"the ledger in the checkpoint is damaged: {error}") from error
        self._committed, self._dropped = committed, dropped
        self._move(place)  # with a larger batch size and drop_last, the rest of the epoch may be too small now


def _cut(run: range, pieces: int) -> list[range]:
    """Contiguous pieces of a run, as even as possible, the larger ones first."""
    size, larger = divmod(len(run), pieces)
    edges = [run.start + piece * size + min(piece, larger) for piece in range(pieces + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def _mixed(seed: int, epoch: int) -> int:
    """A generator seed for which neighbouring seeds and epochs have nothing in common.

    A sum such as seed + epoch would give epoch 1 of seed 0 the order of epoch 0 of seed 1.
    """
    return int.from_bytes(hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8).digest(), "little")


def _span(start: int, stop: int) -> str:
    return f"position {start}" if stop - start == 1 else f"positions {start} to {stop - 1}"


def _miscounted(whole: range, parts: Iterable[range]) -> str:
    """What keeps `parts` from covering `whole` exactly once, in words; empty if nothing does.

    Walks along all the edges with the number of parts that lie over each stretch between them.
    """
    change = defaultdict(int, {whole.start: 0, whole.stop: 0})
    for part in parts:
        assert part.step == 1
        if part:
            change[part.start] += 1
            change[part.stop] -= 1
    faults, depth = [], 0
    for start, stop in pairwise(sorted(change)):
        depth += change[start]
        if start not in whole:
            if depth:
                faults.append(f"{_span(start, stop)} should not be counted")
        elif depth == 0:
            faults.append(f"{_span(start, stop)} would be lost")
        elif depth > 1:
            faults.append(f"{_span(start, stop)} would be counted {'twice' if depth == 2 else f'{depth} times'}")
    return ", ".join(faults)


def _proof(
    length: int | None, place: LedgerPlace, committed: dict[int, list[range]], dropped: dict[int, list[range]]
) -> str:
    """One sentence on all epochs up to `place`, or an error about the first one whose record does not add up."""
    if max(dropped, default=-1) >= place.epoch:
        raise PacelineError(f"the record goes beyond epoch {place.epoch}, which is the one in progress")
    findings = []
    for epoch in range(max(place.epoch, *committed, 0) + 1):
        used, left_out = committed.get(epoch, []), dropped.get(epoch, [])
        if epoch >= place.epoch:
            position = place.position if epoch == place.epoch else 0
            end = position if length is None else min(position, length)
            # With servers samples are counted in any order: some lie ahead of the first that is missing.
            ahead = [run for run in used if run.start > end]
            used = [run for run in used if run.start <= end]
            if (length is None and ahead) or any(run.stop > (length or 0) for run in ahead):
                raise PacelineError(
                    f"the record of epoch {epoch} does not add up: it goes beyond the samples there are"
                )
            if fault := _overlap(ahead):
                raise PacelineError(f"the record of epoch {epoch} does not add up: {fault}")
            count = end + sum(map(len, ahead))
            finding = f"{count} so far, each once" if length is None else f"{count} of {length} so far, each once"
        else:
            # A stream's epoch was as long as what was used of it, and that was at least one sample.
            end = length if length is not None else max((run.stop for run in used), default=1)
            omitted = sum(map(len, left_out))
            finding = f"{end - omitted} samples, each once" + (f", and {omitted} dropped" if omitted else "")
        if fault := _miscounted(range(end), [*used, *left_out]):
            raise PacelineError(f"the record of epoch {epoch} does not add up: {fault}")
        if end or used or (epoch >= place.epoch and not finding.startswith("0 ")):
            findings.append((epoch, finding))
    sentences = []
    for finding, group in groupby(findings, key=lambda item: item[1]):
        epochs = [epoch for epoch, _ in group]
        name = f"epoch {epochs[0]}" if len(epochs) == 1 else f"epochs {epochs[0]} to {epochs[-1]}"
        sentences.append(f"{name}: {finding}")
    return "; ".join(sentences) or "no samples so far"


def _overlap(runs: Iterable[range]) -> str:
    """Which positions are in two of these runs, in words; empty if none are."""
    ordered = sorted(runs, key=lambda run: run.start)
    for before, after in pairwise(ordered):
        if after.start < before.stop:
            return f"{_span(after.start, min(before.stop, after.stop))} would be counted twice"
    return ""


def _append(record: dict[int, list[range]], epoch: int, run: range) -> None:
    """Add a run, joined to the last one where they touch, so that an epoch stays one range."""
    runs = record.setdefault(epoch, [])
    if runs and runs[-1].stop == run.start:
        run = range(runs.pop().start, run.stop)
    runs.append(run)


def _flat(record: dict[int, list[range]]) -> list[list[int]]:
    return [[epoch, run.start, run.stop] for epoch, runs in sorted(record.items()) for run in runs]


def _by_epoch(rows: Iterable[Sequence[int]]) -> dict[int, list[range]]:
    record: dict[int, list[range]] = {}
    for epoch, start, stop in rows:
        record.setdefault(epoch, []).append(range(start, stop))
    return record
