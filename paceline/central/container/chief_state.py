"""What the server that is the chief holds of one run, and how that is noted.

All of it is guarded by one lock, `changed`, which all runs of a container have in common. What must not be forgotten is
written to the container's journal, comes with its snapshots (`notes`), and is made again from both (`load`, `again`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from paceline.central.chief.books import Books
from paceline.central.chief.chief import Chief
from paceline.central.chief.tickets import Close
from paceline.central.container.bounds import check_place
from paceline.central.container.container import Container
from paceline.central.messages.notes import RunNotes
from paceline.central.messages.records import AnyRecord, ChapterShape, Made, MembersChanged, RuleSet, TaskResult
from paceline.central.messages.settings import Settings
from paceline.central.shards import Option
from paceline.errors import CheckpointError, PacelineError


class ChiefState:
    """The chief of a run and what goes with it."""

    def __init__(
        self, container: Container, changed: threading.Condition, settings: Settings, first: int, first_ticket: int
    ) -> None:
        """`first`: the place of its first replica in the container. `first_ticket`: a chief that follows one that has
        died gives a number above all that one can have used."""
        self.container, self.changed = container, changed  # the latter guards all below
        self.settings, self.first = settings, first
        self.chief = Chief(
            settings.rule,
            settings.replicas,
            warmup_steps=settings.warmup_steps,
            warmup_epochs=settings.warmup_epochs,
            first_ticket=first_ticket,
        )
        self.chapters: dict[int, ChapterShape] = {}
        self.seen = 0  # samples counted so far
        self.trained = False  # whether this run has made a step
        self.options: dict[int, list[dict[str, Option]]] = {}  # of the optimizer, by replica: as of its last report
        self.failure: PacelineError | None = None  # nothing is right in this run from there on
        self._noted_members: dict[int, int] = {}
        self._over = False

    def end(self) -> None:
        """Another run goes on, and nobody of this one was there."""
        self.failure = PacelineError(
            f"container {self.container.name!r} has let this run go: none of its replicas was there when another came"
        )
        self._over = True

    @property
    def is_there(self) -> bool:
        """Return whether any of its replicas is."""
        return any(self.chief.members.values())

    @property
    def places(self) -> range:
        return range(self.first, self.first + self.settings.replicas)

    def take_books(self, books: Books) -> None:
        """Take over the books of another chief."""
        with self.changed:
            self.chief.load(books)

    def count(self, close: Close) -> None:
        """All servers have made that step."""
        self.chief.closed(close)
        self.seen += close.samples
        self.trained = True

    # ── the journal ──────────────────────────────────────────────────────────────────────────────────────

    def note(self, record: AnyRecord) -> None:
        """Write a record; `flush`, without the lock, has it survive."""
        journal = self.container.journal
        if not self._over:
            journal.write(record, journal.seal(record, ()))

    def note_members(self) -> None:
        if self.chief.members != self._noted_members:
            self._noted_members = dict(self.chief.members)
            self.note(MembersChanged(first=self.first, members=self._noted_members))

    def flush(self) -> None:
        self.container.journal.flush()

    def notes(self) -> RunNotes:
        """Return what a snapshot has of this."""
        with self.changed:
            return RunNotes(
                settings=self.settings,
                first=self.first,
                books=self.chief.books(),
                rule=self.chief.rule,
                members=dict(self.chief.members),
                chapters=dict(self.chapters),
                trained=self.trained,
            )

    def load(self, notes: RunNotes) -> None:
        """Go on from a snapshot."""
        with self.changed:
            self.chief.load(notes.books)
            self.chief.set_rule(notes.rule)
            self.chapters = dict(notes.chapters)
            self.seen = sum(self.chief.book(number).counted for number in notes.books.chapters)
            self.trained = notes.trained
            self._take_members(notes.members)

    def again(self, record: Made | TaskResult | RuleSet | MembersChanged) -> None:
        """What the journal has since the snapshot, once more."""
        with self.changed:
            match record:
                case Made():
                    if record.chapter is None:
                        raise CheckpointError(f"step {record.close.step} in the log is not that of a chief")
                    self.chief.replay(record.close.moved(-self.first), *record.chapter)
                    self.chapters[record.close.chapter] = record.chapter
                    self.seen += record.close.samples
                    self.trained = True
                case TaskResult():
                    self.chief.tasks.results[record.key] = record.values
                case RuleSet():
                    self.chief.set_rule(record.rule)
                case MembersChanged():
                    self._take_members(record.members)

    def _take_members(self, members: Mapping[int, int]) -> None:
        for replica in members:
            check_place(replica, self.settings.replicas)
        self.chief.members.clear()
        for replica, incarnation in members.items():
            if incarnation:
                self.chief.join(replica, incarnation)
            else:
                self.chief.members[replica] = 0
        self._noted_members = dict(members)
