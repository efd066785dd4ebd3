"""What a snapshot of a server's share of a container says, besides its tensors."""

from __future__ import annotations

import msgspec

from paceline.central.chief.books import Books
from paceline.central.messages.records import ChapterShape, Made, Pushed
from paceline.central.messages.settings import Settings
from paceline.central.messages.tensor_bytes import Entry
from paceline.central.shards import Spec
from paceline.rules import Rule


class RunNotes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run that trains the container, or was the last to do so."""

    settings: Settings
    first: int  # the place of its first replica
    books: Books
    rule: Rule
    members: dict[int, int]  # incarnations by replica
    chapters: dict[int, ChapterShape]
    trained: bool  # whether it has made a step


class ChiefNotes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What only the chief knows."""

    runs: list[RunNotes]
    buffers: list[str]
    frozen: list[str]  # parameters that are not trained
    keys: list[tuple[str, str]]  # of the model's state_dict, and which tensor each is
    last: Made | None  # the last step that was decided, which other servers may not have made yet


class ShareNotes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose share it is, and all of it that is no tensor."""

    name: str
    server: int
    addresses: list[str]  # of all servers
    spec: Spec
    settings: Settings
    step: int
    numbers: list[tuple[int, str, float]]  # of the optimizer's state: slot, key, value
    table_steps: list[int]
    waiting: list[Pushed]  # gradients that are in no step yet
    incarnations: dict[int, int]  # by place, as all of gradients
    used: dict[int, int]  # by place: the last ticket that went into a step
    chief: ChiefNotes | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A snapshot in a file. Body: its tensors, one after another."""

    entries: list[Entry]
    notes: ShareNotes
