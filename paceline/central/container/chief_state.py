"""What the server that is the chief holds of a training besides its share of the parameters, and how that is noted.

All of it is guarded by one lock, `changed`. What must not be forgotten is written to the container's journal, comes
with its snapshots (`whole`), and is made again from both (`load`, `again`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import msgspec
import torch

from paceline.central.chief.books import Books
from paceline.central.chief.chief import Chief
from paceline.central.chief.tickets import Close
from paceline.central.container.buffers import ModelBuffers
from paceline.central.container.container import Container
from paceline.central.messages.notes import ChiefNotes
from paceline.central.messages.records import AnyRecord, ChapterShape, Made, MembersChanged, RuleSet, TaskResult
from paceline.errors import CheckpointError


class ChiefState:
    """The chief of a container and what goes with it."""

    def __init__(self, container: Container, first_ticket: int = 1) -> None:
        """`first_ticket`: a chief that follows one that has died gives a number above all that one can have used."""
        self.container = container
        self._first_ticket = first_ticket
        self.changed = threading.Condition()  # guards all below
        self.chief = self._new_chief()
        self.buffers = ModelBuffers()
        self.frozen: list[tuple[str, torch.Tensor]] = []  # parameters that are not trained
        self.keys: list[tuple[str, str]] = []  # of the model's state_dict, and which tensor each is
        self.chapters: dict[int, ChapterShape] = {}
        self.seen = 0  # samples counted so far
        self.trained = False  # whether this run has made a step
        self.last: Made | None = None  # the last step that was decided, if there is a journal
        self._noted_members: dict[int, int] = {}

    def _new_chief(self) -> Chief:
        settings = self.container.settings
        return Chief(
            settings.rule,
            settings.replicas,
            warmup_steps=settings.warmup_steps,
            warmup_epochs=settings.warmup_epochs,
            first_ticket=self._first_ticket,
        )

    def describe(
        self,
        buffers: list[tuple[str, torch.Tensor]],
        frozen: list[tuple[str, torch.Tensor]],
        keys: Sequence[tuple[str, str]] = (),
    ) -> None:
        """The model has these buffers, these parameters that are not trained, and these keys in its state_dict."""
        self.buffers.tensors, self.frozen, self.keys = buffers, frozen, list(keys)

    def begin_run(self) -> None:
        """Another run goes on from the books. What was measured is still true; what was saved was so for another."""
        books = self.chief.books()
        results = [(key, sums) for key, sums in books.results if key.holds_for_later_runs]
        self.chief = self._new_chief()
        self.chief.load(msgspec.structs.replace(books, results=results))
        self.trained, self.last = False, None

    def books(self) -> Books:
        with self.changed:
            return self.chief.books()

    def take_books(self, books: Books, values: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        """Take over the books of another chief; and new `values` of buffers, and of what is not trained."""
        with self.changed:
            self.chief.load(books)
            self.last = None
            for tensor, value in values:
                tensor.copy_(value)

    def count(self, close: Close) -> None:
        """All servers have made that step."""
        self.buffers.merge(close)
        self.chief.closed(close)
        self.seen += close.samples
        self.trained = True

    # ── the journal ──────────────────────────────────────────────────────────────────────────────────────

    def note(self, record: AnyRecord) -> None:
        """Write a record; `flush`, without the lock, has it survive."""
        journal = self.container.journal
        journal.write(record, journal.seal(record, ()))

    def note_members(self) -> None:
        if self.chief.members != self._noted_members:
            self._noted_members = dict(self.chief.members)
            self.note(MembersChanged(members=self._noted_members))

    def flush(self) -> None:
        self.container.journal.flush()

    def whole(self) -> tuple[dict[str, torch.Tensor], ChiefNotes]:
        """Return what a snapshot has of this, in memory of its own."""
        with self.changed:
            tensors = {f"buffer/{name}": tensor.clone() for name, tensor in self.buffers.tensors}
            tensors |= {f"frozen/{name}": tensor.clone() for name, tensor in self.frozen}
            return tensors, ChiefNotes(
                books=self.chief.books(),
                rule=self.chief.rule,
                members=dict(self.chief.members),
                chapters=dict(self.chapters),
                trained=self.trained,
                buffers=[name for name, _ in self.buffers.tensors],
                frozen=[name for name, _ in self.frozen],
                keys=self.keys,
                last=self.last,
            )

    def load(self, tensors: Mapping[str, torch.Tensor], notes: ChiefNotes) -> None:
        """Go on from a snapshot."""
        with self.changed:
            buffers = [(name, tensors[f"buffer/{name}"]) for name in notes.buffers]
            frozen = [(name, tensors[f"frozen/{name}"]) for name in notes.frozen]
            self.describe(buffers, frozen, notes.keys)
            self.chief.load(notes.books)
            self.chief.set_rule(notes.rule)
            self.chapters = dict(notes.chapters)
            self.seen = sum(self.chief.book(number).counted for number in notes.books.chapters)
            self.trained, self.last = notes.trained, notes.last
            self._take_members(notes.members)

    def again(self, record: Made | TaskResult | RuleSet | MembersChanged, body: memoryview) -> None:
        """What the journal has since the snapshot, once more."""
        with self.changed:
            match record:
                case Made():
                    if record.chapter is None:
                        raise CheckpointError(f"step {record.close.step} in the log is not that of a chief")
                    self.chief.replay(record.close, *record.chapter)
                    self.chapters[record.close.chapter] = record.chapter
                    self.seen += record.close.samples
                    self.trained = True
                    self.last = record
                    self.buffers.unpack(body)
                case TaskResult():
                    self.chief.tasks.results[record.key] = record.values
                case RuleSet():
                    self.chief.set_rule(record.rule)
                case MembersChanged():
                    self._take_members(record.members)

    def _take_members(self, members: Mapping[int, int]) -> None:
        self.chief.members.clear()
        for replica, incarnation in members.items():
            if incarnation:
                self.chief.join(replica, incarnation)
            else:
                self.chief.members[replica] = 0
        self._noted_members = dict(members)
