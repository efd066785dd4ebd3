"""The chief's books while it writes in them: which samples count, how many steps were made, what became of tickets."""

from __future__ import annotations

import msgspec

from paceline.central.chief.books import Books
from paceline.central.chief.members import ScriptPlace
from paceline.central.chief.tickets import Accepted, Close, OpenTicket, Outcome
from paceline.data.book import Book
from paceline.errors import CheckpointError, DataError


class OpenBooks:
    """Everything that a chief must not forget, but for results of tasks."""

    def __init__(self) -> None:
        self.step = 0  # closed so far
        self.others = 0  # steps that other runs have made in the same container
        self.last = Outcome(None, 0.0, 0)
        self.staleness: dict[int, int] = {}  # how many gradients had which
        self.late = self.dropped = 0
        self.first_chapter = 0  # earlier ones were finished before the run was resumed
        self._chapters: dict[int, Book] = {}
        self._outcomes: dict[int, tuple[int, Outcome]] = {}  # by replica: its last ticket that was settled

    # ── chapters ─────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, number: int, length: int, batch_size: int, left_out: int) -> None:
        """Prepare for questions for samples of chapter `number`."""
        if number < self.first_chapter:
            return
        book = self._chapters.get(number)
        if book is None:
            self._chapters[number] = Book(length, batch_size=batch_size, left_out=left_out)
        elif book.length != length:
            raise DataError("dataset length", length, f"another replica has {book.length} samples; give all the same")
        else:
            book.batch_size = batch_size
            book.leave_out(left_out)

    def book(self, chapter: int) -> Book:
        return self._chapters[chapter]

    def finished(self, place: ScriptPlace) -> bool:
        """Return whether nothing is left to do for a replica at that place."""
        return self._chapters[place[0]].finished(place[1])

    def give_back(self, ticket: OpenTicket) -> None:
        """Have the samples of that ticket free again."""
        self._chapters[ticket.chapter].give_back(ticket.work.epoch, ticket.work.runs)

    @property
    def version(self) -> int:
        """Return how many steps the parameters have seen, whosever."""
        return self.step + self.others

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────

    def count(self, close: Close) -> None:
        """Count a step that all servers have made."""
        self.step += 1
        self.last = Outcome(None, close.loss, close.samples, close.logged)
        for accepted in close.accepted:
            self._chapters[close.chapter].commit(accepted.epoch, _runs(accepted))
            self.count_staleness(accepted.staleness)
            self.settle(accepted.replica, accepted.ticket, close.step)

    def count_again(self, close: Close, length: int, batch_size: int, left_out: int) -> None:
        """Count a step of the log, made before this process began. The log may begin before what was loaded."""
        if close.step > self.version:
            raise CheckpointError(f"the log lacks step {self.version}: it goes on with step {close.step}")
        if close.step == self.version:
            self.begin(close.chapter, length, batch_size, left_out)
            for accepted in close.accepted:
                self._chapters[close.chapter].take_these(accepted.epoch, _runs(accepted))
            self.count(close)

    def count_other(self, version: int) -> None:
        """Another run has made the step that this is the version after."""
        self.others = max(self.others, version - self.step)

    def count_staleness(self, staleness: int) -> None:
        self.staleness[staleness] = self.staleness.get(staleness, 0) + 1

    def settle(self, replica: int, ticket: int, step: int | None) -> None:
        """Write down that a ticket went into a step, or into none."""
        self._outcomes[replica] = (ticket, msgspec.structs.replace(self.last, step=step))

    def outcome(self, replica: int, ticket: int) -> Outcome:
        """Return what became of a ticket that is not open any more."""
        settled, outcome = self._outcomes.get(replica, (None, self.last))
        return outcome if settled == ticket else self.last  # else it was given back while it was on its way

    # ── as a value ───────────────────────────────────────────────────────────────────────────────────────

    def state(self) -> Books:
        return Books(
            step=self.step,
            others=self.others,
            first_chapter=self.first_chapter,
            chapters={number: book.state() for number, book in self._chapters.items()},
            staleness=dict(self.staleness),
            late=self.late,
            dropped=self.dropped,
            last=self.last,
            outcomes=dict(self._outcomes),
        )

    def load(self, books: Books) -> None:
        self.step, self.others, self.first_chapter = books.step, books.others, books.first_chapter
        self._chapters = {number: Book.load(chapter) for number, chapter in books.chapters.items()}
        self.staleness = dict(books.staleness)
        self.late, self.dropped = books.late, books.dropped
        self.last, self._outcomes = books.last, dict(books.outcomes)


def _runs(accepted: Accepted) -> list[range]:
    return [range(start, stop) for start, stop in accepted.runs]
