"""What a server must not forget, one record for each thing that happens to it.

The same records go into a log (`journal.py`) or to another server (`peer_journal.py`), and make the same state again
when they are gone through in order (`snapshot.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import torch

from paceline.central.chief.tasks import TaskKey
from paceline.central.chief.tickets import Close
from paceline.central.shards import Option
from paceline.rules import Rule

ChapterShape = tuple[int, int, int]  # length, batch size, samples left out


class Record(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all."""


class Pushed(Record, frozen=True, kw_only=True):
    """A gradient is here. Body: the flat buffer."""

    replica: int  # its place in the container, as in all records of gradients
    incarnation: int
    ticket: int
    untouched: list[int]
    rows: list[int] = []  # of each table: how many; ids and values of each follow in the body


class PulledCopy(Record, frozen=True, kw_only=True):
    """What a gradient of the next step was computed on, which corrects it. Body: the flat buffer."""

    replica: int


class RowsPut(Record, frozen=True, kw_only=True):
    """Values of some rows of a table, given from outside. Body: those."""

    table: int
    key: str
    start: int
    steps: int | None


class Made(Record, frozen=True, kw_only=True):
    """A step, as it was decided. Body, on the chief: the merged buffers."""

    close: Close
    options: list[dict[str, Option]]
    scale: float
    chapter: ChapterShape | None = None  # on the chief


class OfRun(Record, frozen=True, kw_only=True):
    """What only the chief of one run has to know."""

    first: int = 0  # the place of that run's first replica


class TaskResult(OfRun, frozen=True, kw_only=True):
    """A task is done."""

    key: TaskKey
    values: list[float]


class RuleSet(OfRun, frozen=True, kw_only=True):
    rule: Rule


class MembersChanged(OfRun, frozen=True, kw_only=True):
    """Who takes part from now on: incarnations by replica."""

    members: dict[int, int]


AnyRecord = Pushed | PulledCopy | RowsPut | Made | TaskResult | RuleSet | MembersChanged
Body = memoryview


def packed(tensors: Iterable[torch.Tensor]) -> list[memoryview]:
    """Return the memory of tensors, one after another."""
    return [tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data for tensor in tensors]
