"""The chief's books and the state of a run: one made of the other, so that any strategy resumes any other's."""

from __future__ import annotations

import msgspec

from paceline.central.chief.books import Books
from paceline.central.chief.tasks import EvaluationTask
from paceline.data.book import ChapterBook
from paceline.data.ledger import Ledger
from paceline.evaluations import EvaluationResult
from paceline.loop.evaluation import as_added_up
from paceline.loop.run_state import RunState


def with_counted(ledger: Ledger | None, chapter: int, books: Books) -> Ledger | None:
    """Returns the ledger of that chapter with what the books have counted."""
    counted = books.chapters.get(chapter)
    if ledger is not None and counted is not None:
        ledger.settle(books.step, counted.counted)
    return ledger


def with_books(state: RunState, books: Books) -> RunState:
    """Returns the state of a run that has come as far as the chief's books say."""
    ledger = with_counted(Ledger.like(state.ledger), state.chapter, books) if state.ledger is not None else None
    known = {result.key: result for result in state.results}
    results = [
        known.get(task.key) or EvaluationResult(task.key, sums, None)
        for task, sums in books.results
        if isinstance(task, EvaluationTask)
    ]
    return msgspec.structs.replace(
        state,
        step=books.step,
        steps_before=books.step - (ledger.step if ledger is not None else 0),
        ledger=ledger.record() if ledger is not None else None,
        results=results,
    )


def books_of(state: RunState) -> Books:
    """Returns the books of a chief that goes on from there."""
    chapters = {}
    if (ledger := state.ledger) is not None:
        assert ledger.length is not None
        used = ledger.length - (ledger.length % ledger.batch_size if ledger.drop_last else 0)
        chapters[state.chapter] = ChapterBook(
            batch_size=ledger.batch_size,
            length=ledger.length,
            used=used,
            began=ledger.epoch,
            counted=[(epoch, start, stop) for epoch, start, stop in ledger.committed if start < used],
        )
    results = [(EvaluationTask(result.key), as_added_up(result)) for result in state.results]
    return Books(step=state.step, first_chapter=state.chapter, chapters=chapters, results=results)  # type: ignore[arg-type]
