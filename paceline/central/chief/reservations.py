"""What async replicas have been told that they will most likely get next, so that they load it while they compute.

Promised samples are out of the book like those that somebody computes, but nobody has to wait for them: when there is
nothing else left, promises are broken, and whoever asks gets what was promised to others.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.data.book import Book, Runs


class Reservations:
    """At most one for each replica."""

    def __init__(self, book: Callable[[int], Book]) -> None:
        """`book`: that of a chapter."""
        self._book = book
        self._made: dict[int, tuple[int, int, Runs]] = {}  # by replica: chapter, epoch, samples

    def make(self, replica: int, chapter: int, samples: int, stop_epoch: int) -> tuple[int, Runs] | None:
        """Epoch and samples that `replica` will get next in that chapter; None if there are none."""
        taken = self._book(chapter).take(samples, stop_epoch)
        if taken is not None:
            self._made[replica] = (chapter, *taken)
        return taken

    def keep(self, replica: int, chapter: int, stop_epoch: int) -> tuple[int, Runs] | None:
        """What was promised to it, if that is what it asks for."""
        promised = self._made.get(replica)
        if promised is None or promised[0] != chapter or promised[1] >= stop_epoch:
            self.break_off(replica)
            return None
        del self._made[replica]
        return promised[1:]

    def break_off(self, replica: int) -> None:
        promised = self._made.pop(replica, None)
        if promised is not None:
            chapter, epoch, runs = promised
            self._book(chapter).give_back(epoch, runs)

    def break_all(self) -> None:
        for replica in list(self._made):
            self.break_off(replica)
