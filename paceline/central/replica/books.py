"""The chief's books and the notes of a checkpoint: one made of the other, so that any strategy resumes any other's."""

from __future__ import annotations

from typing import Any

from paceline.loop.script_position import ScriptPosition


def notes_of(books: dict[str, Any], position: ScriptPosition) -> dict[str, Any]:
    """The chief's books, as a checkpoint of any strategy has them."""
    ledger = position.ledger
    chapter = books["chapters"].get(str(position.chapter))
    if ledger is not None and chapter is not None:
        ledger.settle(books["step"], chapter["counted"])
    return {
        "step": books["step"],
        "steps_before": books["step"] - (ledger.step if ledger is not None else 0),
        "chapter": max(position.chapter, 0),
        "ledger": ledger.state() if ledger is not None else None,
        "results": [],
    }


def books_of(notes: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's notes as the chief keeps them."""
    chapters = {}
    ledger = notes["ledger"]
    if ledger is not None:
        left_out = ledger["length"] % ledger["batch_size"] if ledger["drop_last"] else 0
        chapters[str(notes["chapter"])] = {
            "batch_size": ledger["batch_size"],
            "length": ledger["length"],
            "used": ledger["length"] - left_out,
            "began": ledger["epoch"],
            "counted": [row for row in ledger["committed"] if row[1] < ledger["length"] - left_out],
        }
    return {
        "step": notes["step"],
        "next_ticket": 1,
        "first_chapter": notes["chapter"],
        "chapters": chapters,
        "results": {f"evaluation {list(name)}": _as_list(value) for *name, value in notes["results"]},
        "staleness": {},
        "late": 0,
        "dropped": 0,
        "last": [0.0, 0],
        "outcomes": [],
    }


def _as_list(value: Any) -> list[float]:
    return list(value.values()) if isinstance(value, dict) else [value]
