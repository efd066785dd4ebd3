"""The chief's book: which samples are free, which are out with a replica, which have been counted.

A replica that shares no step with the others cannot work out its samples by itself, as with a `Ledger`. So the chief
of a centralized run keeps the one book, hands out runs of positions, and gets each back in one of two ways:

              ┌──────── give back (late, dropped, dead) ────────┐
              ▼                                                 │
    free ── take ──▶ out with a replica ── commit (with the update) ──▶ counted

What was given back is handed out again first, so an epoch's samples never wait for long. Positions are of the order
that a replica's own `Ledger` draws from (seed, epoch): the book needs neither the dataset nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

Runs = tuple[range, ...]  # positions, in order
CountedRun = tuple[int, int, int]  # epoch, start, stop


class ChapterBook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A book as a value: what was counted, and what is free follows from that."""

    length: int
    used: int  # samples of each epoch that is not finished
    batch_size: int = 1
    began: int = 0  # epochs
    finished: int = 0  # epochs
    counted: list[CountedRun] = []


class Book:
    """The samples of one dataset over its epochs.

    >>> book = Book(length=10)
    >>> epoch, first = book.take(6, stop_epoch=1)
    >>> book.take(6, stop_epoch=1)
    (0, (range(6, 10),))
    >>> book.commit(0, [range(6, 10)]); book.give_back(0, first); book.take(4, stop_epoch=1)
    (0, (range(0, 4),))
    """

    def __init__(self, length: int, *, batch_size: int = 1, left_out: int = 0) -> None:
        """`left_out`: how many samples at the end of each epoch's order are not used (drop_last)."""
        self.length = length
        self.batch_size = batch_size  # of those who take from it now
        self._used = length - left_out
        self._free: dict[int, list[range]] = {}  # epochs that have begun
        self._out: dict[int, list[range]] = {}
        self._counted: dict[int, list[range]] = {}
        self._began = 0  # epochs that have begun
        self._finished = 0  # epochs from the first on of which nothing is left, so that a long run stays quick

    # ── what a rule does with it ─────────────────────────────────────────────────────────────────────────

    def take(self, samples: int, stop_epoch: int, *, only_epoch: int | None = None) -> tuple[int, Runs] | None:
        """Up to so many samples of the first epoch that has any left, before `stop_epoch`; None if there are none."""
        first, stop = (self._finished, stop_epoch) if only_epoch is None else (only_epoch, only_epoch + 1)
        for epoch in range(first, min(stop, stop_epoch)):
            if epoch >= self._began:
                if only_epoch is not None or not self._used:
                    return None
                self._begin()
            if self._free[epoch]:
                taken, self._free[epoch] = _split(self._free[epoch], samples)
                self._out[epoch] = merged([*self._out[epoch], *taken])
                return epoch, tuple(taken)
        return None

    def take_these(self, epoch: int, runs: Iterable[range]) -> None:
        """Exactly these, which must be free."""
        while epoch >= self._began:
            self._begin()
        runs = list(runs)
        self._free[epoch] = without(self._free[epoch], runs)
        self._out[epoch] = merged([*self._out[epoch], *runs])

    def _begin(self) -> None:
        self._free[self._began] = merged([range(self._used)])
        self._out[self._began] = []
        self._counted[self._began] = []
        self._began += 1

    def leave_out(self, left_out: int) -> None:
        """From now on so many samples at the end are not used: in epochs that are not finished."""
        if self.length - left_out == self._used:
            return
        self._used = self.length - left_out
        for epoch in range(self._finished, self._began):
            self._free[epoch] = _gaps([*self._out[epoch], *self._counted[epoch]], self._used)
        self._look_for_finished()

    def _look_for_finished(self) -> None:
        while self._finished < self._began and not self._free[self._finished] and not self._out[self._finished]:
            self._finished += 1

    def give_back(self, epoch: int, runs: Iterable[range]) -> None:
        """These were out and will not be counted: they are free again."""
        runs = list(runs)
        self._out[epoch] = without(self._out[epoch], runs)
        self._free[epoch] = merged([*self._free[epoch], *runs])

    def commit(self, epoch: int, runs: Iterable[range]) -> None:
        """These were out, and went into an update."""
        runs = list(runs)
        self._out[epoch] = without(self._out[epoch], runs)
        self._counted[epoch] = merged([*self._counted[epoch], *runs])
        self._look_for_finished()

    # ── what can be asked ────────────────────────────────────────────────────────────────────────────────

    def finished(self, stop_epoch: int) -> bool:
        """Whether every sample of the epochs before `stop_epoch` has been counted."""
        return self._finished >= stop_epoch or (not self._used and self._finished == self._began)

    def free(self, epoch: int) -> int:
        """Samples of an epoch that has begun which nobody has."""
        return sum(map(len, self._free[epoch]))

    @property
    def counted(self) -> int:
        """Samples counted over all epochs."""
        return sum(len(run) for runs in self._counted.values() for run in runs)

    def left(self, stop_epoch: int) -> int:
        """Samples of the epochs before `stop_epoch` that have not been counted."""
        begun = range(self._finished, min(stop_epoch, self._began))
        unsettled = sum(len(run) for epoch in begun for run in [*self._free[epoch], *self._out[epoch]])
        return unsettled + self._used * max(0, stop_epoch - self._began)

    def rows(self) -> list[CountedRun]:
        """Everything counted."""
        return [(epoch, run.start, run.stop) for epoch, runs in sorted(self._counted.items()) for run in runs]

    # ── as a value ───────────────────────────────────────────────────────────────────────────────────────

    def state(self) -> ChapterBook:
        """What `load` makes the same book of, but for what is out."""
        return ChapterBook(
            length=self.length,
            used=self._used,
            batch_size=self.batch_size,
            began=max(self._finished, *(epoch + 1 for epoch, runs in self._counted.items() if runs), 0),
            finished=self._finished,
            counted=self.rows(),
        )

    @classmethod
    def load(cls, state: ChapterBook) -> Book:
        """A book in which what was out when the state was taken is free."""
        book = cls(state.length, batch_size=state.batch_size, left_out=state.length - state.used)
        for _ in range(max(state.began, *(epoch + 1 for epoch, _, _ in state.counted), 0)):
            book._begin()
        for epoch, start, stop in state.counted:
            book._counted[epoch].append(range(start, stop))
        for epoch, runs in book._counted.items():
            # What a finished epoch has left out stays so, also when later ones leave out fewer.
            book._counted[epoch] = merged(runs)
            book._free[epoch] = [] if epoch < state.finished else _gaps(runs, book._used)
        book._look_for_finished()
        return book


def cut(runs: Sequence[range], pieces: int) -> list[Runs]:
    """The positions of `runs`, in order, as so many pieces that are as even as possible, the larger ones first.

    >>> cut([range(0, 3), range(8, 10)], 2)
    [(range(0, 3),), (range(8, 10),)]
    """
    size, larger = divmod(sum(map(len, runs)), pieces)
    rest, found = list(runs), []
    for piece in range(pieces):
        taken, rest = _split(rest, size + (piece < larger))
        found.append(tuple(taken))
    return found


def merged(runs: Iterable[range]) -> list[range]:
    """The same positions as few runs, in order; a position twice is an error.

    >>> merged([range(4, 6), range(0, 2), range(2, 4)])
    [range(0, 6)]
    """
    found: list[range] = []
    for run in sorted((run for run in runs if run), key=lambda run: run.start):
        if found and run.start < found[-1].stop:
            twice = range(run.start, min(run.stop, found[-1].stop))
            raise ValueError(f"positions {twice.start} to {twice.stop - 1} are there twice")
        if found and run.start == found[-1].stop:
            found[-1] = range(found[-1].start, run.stop)
        else:
            found.append(run)
    return found


def without(runs: Iterable[range], removed: Iterable[range]) -> list[range]:
    """The positions of `runs` that are not in `removed`, all of which must be there.

    >>> without([range(0, 10)], [range(3, 5)])
    [range(0, 3), range(5, 10)]
    """
    left = merged(runs)
    for run in removed:
        if not run:
            continue
        for index, there in enumerate(left):
            if there.start <= run.start and run.stop <= there.stop:
                parts = (range(there.start, run.start), range(run.stop, there.stop))
                left[index : index + 1] = [part for part in parts if part]
                break
        else:
            raise ValueError(f"positions {run.start} to {run.stop - 1} are not all there")
    return left


def _gaps(runs: Iterable[range], stop: int) -> list[range]:
    """The positions before `stop` that are not in `runs`.

    >>> _gaps([range(2, 4), range(8, 12)], 10)
    [range(0, 2), range(4, 8)]
    """
    found, position = [], 0
    for run in merged(runs):
        found.append(range(position, min(run.start, stop)))
        position = run.stop
    return merged([*found, range(position, stop)])


def _split(runs: Sequence[range], samples: int) -> tuple[list[range], list[range]]:
    """The first so many positions, and the rest."""
    first: list[range] = []
    rest = list(runs)
    while samples and rest:
        run = rest.pop(0)
        take = min(samples, len(run))
        first.append(range(run.start, run.start + take))
        samples -= take
        if take < len(run):
            rest.insert(0, range(run.start + take, run.stop))
    return first, rest
