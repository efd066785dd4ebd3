"""The chief's books as a value: for whoever saves a training, resumes one, reads about it, or follows a dead chief.

A loss need not be finite, so books travel and lie on disk as msgpack: JSON has no word for such a number.
"""

from __future__ import annotations

import msgspec

from paceline.central.chief.tasks import TaskKey
from paceline.central.chief.tickets import Outcome
from paceline.data.book import ChapterBook


class Books(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a chief knows of a training, but for who is there and what they hold."""

    step: int = 0  # closed so far
    others: int = 0  # steps of other runs in the same container: version is what both come to
    next_ticket: int = 1
    first_chapter: int = 0  # earlier ones were finished before the run was resumed
    chapters: dict[int, ChapterBook] = {}
    results: list[tuple[TaskKey, list[float]]] = []  # of tasks that are done
    staleness: dict[int, int] = {}  # how many gradients had which
    late: int = 0
    dropped: int = 0
    last: Outcome = Outcome(None, 0.0, 0)  # the last step's loss and samples
    outcomes: dict[int, tuple[int, Outcome]] = {}  # by replica: its last ticket that was settled
