"""What servers answer: every reply there is, as a fixed schema."""

from __future__ import annotations

import msgspec

from paceline.central.chief.books import Books
from paceline.central.messages.notes import ShareNotes
from paceline.central.messages.tensor_bytes import Entry
from paceline.central.shards import Spec
from paceline.rules import Rule, Sync

Run = tuple[int, int]


class _Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all."""


class Done(_Reply, frozen=True):
    """Nothing more to say."""


class Challenge(_Reply, frozen=True, kw_only=True):
    """Prove that you know the token, with this number."""

    nonce: bytes


class Refused(_Reply, frozen=True, kw_only=True):
    """A sentence for the user."""

    sentence: str


class Opened(_Reply, frozen=True, kw_only=True):
    """The container is there."""

    step: int  # the version of the parameters
    filled: bool
    arena: tuple[int, int] | None  # process and descriptor, if memory can be shared
    place: tuple[int, int] | None = None  # the same of the replica's place
    reopened: bool = False  # an earlier run, or another, has left what is there
    tables: list[tuple[int, int]] = []  # the same of every table
    first: int = 0  # this and what follows is known to the chief: the place of the run's first replica
    made: int = 0  # steps of this run


class Pulled(_Reply, frozen=True, kw_only=True):
    step: int


class Ticket(_Reply, frozen=True, kw_only=True):
    """Work."""

    ticket: int
    step: int
    version: int
    epoch: int
    runs: list[Run]
    part: int
    exact: bool
    sync: bool  # the rule under which it was handed out
    needed: int = 1  # how many tickets close the step
    following: tuple[int, list[Run]] | None = None  # epoch and samples that most likely come next


class Waiting(_Reply, frozen=True, kw_only=True):
    """Ask again: nothing yet. `why` names what is waited for."""

    why: str


class Ended(_Reply, frozen=True, kw_only=True):
    """No more work in this chapter; body: the merged buffers."""

    step: int
    version: int
    stop: bool
    loss: float


class Settled(_Reply, frozen=True, kw_only=True):
    """What became of a ticket. `accepted` is the step that took it; None: it was late. With a `next` one, the reply's
    body: the model's buffers."""

    accepted: int | None
    step: int  # closed so far
    version: int
    loss: float
    samples: int
    replicas: int  # members now
    chief: bool  # whether this replica speaks for the others
    seen: int  # samples counted so far
    next: Ticket | None = None
    logged: dict[str, float] = {}  # means over the step of what losses log beside themselves


class TaskPart(_Reply, frozen=True, kw_only=True):
    """A part of a task to do."""

    part: int
    start: int
    stop: int


class Result(_Reply, frozen=True, kw_only=True):
    """A task is done."""

    values: list[float]
    chief: bool


class Copied(_Reply, frozen=True, kw_only=True):
    """A frozen copy has been made."""

    number: int
    step: int


class Tensors(_Reply, frozen=True, kw_only=True):
    """Named tensors: type, shape; the body holds them one after another."""

    entries: list[Entry]
    numbers: list[tuple[str, float]] = []


class BooksRead(_Reply, frozen=True, kw_only=True):
    books: Books


class SquaredNorm(_Reply, frozen=True, kw_only=True):
    squared: float


class RunListing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run that trains a container, or was the last to do so."""

    replicas: list[int]  # that are there
    rule: str
    step: int  # closed so far
    seen: int  # samples
    loss: float


class Listing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One container, as a list shows it."""

    name: str
    step: int
    bytes: int
    tensors: int
    optimizer: str
    replicas: int = 0  # this and what follows is known to the chief
    runs: int = 0  # that are there
    rule: str = ""
    loss: float = 0.0


class Listed(_Reply, frozen=True, kw_only=True):
    containers: list[Listing]


class Described(_Reply, frozen=True, kw_only=True):
    """A container, as one of its servers sees it. The chief knows the fields below `addresses`; of several runs they
    are those of the one that came last."""

    spec: Spec
    server: int
    step: int
    addresses: list[str]  # of all servers, as the replicas know them
    members: list[int] = []  # replicas that are there
    rule: Rule = Sync()
    accepting: int = 0
    runs: list[RunListing] = []
    keys: list[tuple[str, str]] = []
    buffers: list[Entry] = []
    frozen: list[Entry] = []


class Kept(_Reply, frozen=True, kw_only=True):
    """A copy of a server's share. Body: its tensors."""

    entries: list[Entry]
    notes: ShareNotes
    position: int  # records that are in it


class Missing(_Reply, frozen=True):
    """There is no such copy here."""


Plain = Done | Refused | Waiting | Missing  # to requests of many kinds
OfTraining = Opened | Pulled | Ticket | Ended | Settled | TaskPart | Result | SquaredNorm
Read = Copied | Tensors | BooksRead | Listed | Described | Kept
Reply = Challenge | Plain | OfTraining | Read
REPLIES = msgspec.msgpack.Decoder(Reply)
