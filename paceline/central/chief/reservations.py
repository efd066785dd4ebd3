"""What async replicas have been told that they will most likely get next, so that they load it while they compute.

Reserved samples are out of the book like those that somebody computes, but nobody has to wait for them: when there is
nothing else left, reservations are cancelled, and whoever asks gets what was reserved for others.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.data.book import Book, Runs


class Reservations:
    """Keeps at most one reservation for each replica."""

    def __init__(self, book: Callable[[int], Book]) -> None:
        """`book` returns that of a chapter."""
        self._book = book
        self._made: dict[int, tuple[int, int, Runs]] = {}  # by replica: chapter, epoch, samples

    def make(self, replica: int, chapter: int, samples: int, stop_epoch: int) -> tuple[int, Runs] | None:
        """Return epoch and samples that `replica` will get next in that chapter; None if there are none."""
        taken = self._book(chapter).take(samples, stop_epoch)
        if taken is not None:
            self._made[replica] = (chapter, *taken)
        return taken

    def take(self, replica: int, chapter: int, stop_epoch: int) -> tuple[int, Runs] | None:
        """Return what was reserved for it, if that is what it asks for; else cancel that."""
        reserved = self._made.get(replica)
        if reserved is None or reserved[0] != chapter or reserved[1] >= stop_epoch:
            self.cancel(replica)
            return None
        del self._made[replica]
        return reserved[1:]

    def cancel(self, replica: int) -> None:
        reserved = self._made.pop(replica, None)
        if reserved is not None:
            chapter, epoch, runs = reserved
            self._book(chapter).give_back(epoch, runs)

    def cancel_all(self) -> None:
        for replica in list(self._made):
            self.cancel(replica)
