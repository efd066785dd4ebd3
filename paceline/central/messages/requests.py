"""What replicas, clients and servers ask of a server: every request there is, as a fixed schema.

A connection carries one request at a time and one reply to each. Requests may be sent again after a connection broke:
each is safe to repeat. Tensors travel as the body of a frame; the comments say what it holds.

The decoders here and in `replies` are made at import, once: msgspec 0.22 crashes when one thread makes the first
decoder of a type while another already decodes with it (it sees a half-made description of the type).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline.central.chief.books import Books
from paceline.central.chief.tasks import TaskKey
from paceline.central.chief.tickets import Close
from paceline.central.messages.notes import ShareNotes
from paceline.central.messages.records import AnyRecord
from paceline.central.messages.settings import Settings
from paceline.central.messages.tensor_bytes import Entry
from paceline.central.shards import Option, Spec
from paceline.data.script_call import ScriptCall
from paceline.loss_value import LossPart
from paceline.rules import Rule


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all."""


class _OfContainer(_Request, frozen=True, kw_only=True):
    """About one container."""

    container: str


class _OfReplica(_OfContainer, frozen=True, kw_only=True):
    """From one of its replicas, and of which of that replica's processes it is. The chief is told the replica's number
    in the run, and with a gradient comes its place in the container."""

    replica: int
    incarnation: int


class _OfShare(_OfContainer, frozen=True, kw_only=True):
    """From one of its servers, about the copy of its share that the next one keeps."""

    server: int  # whose share it is
    incarnation: int  # of that server's process: older ones are not listened to any more


class Hello(_Request, frozen=True, kw_only=True):
    """First on every connection."""

    version: str  # of Paceline
    who: str = ""


class Proof(_Request, frozen=True, kw_only=True):
    """The answer to a `Challenge`: that the token is known."""

    proof: bytes


class Open(_OfReplica, frozen=True, kw_only=True):
    """A replica takes its place in a container, which is made if it is not there."""

    spec: Spec
    settings: Settings
    addresses: list[str]  # of all servers, in order
    server: int  # which of them is addressed
    machine: str  # where the replica runs: whether memory can be shared
    checks: list[int]  # a checksum of each parameter's initial value
    first: int | None = None  # the place of the run's first replica, as the chief has said


class Fill(_OfContainer, frozen=True, kw_only=True):
    """Values for parameters that have none. Body: this server's flat buffer; for the chief then the model's buffers,
    and the parameters that are not trained."""

    buffers: list[Entry] = []
    frozen: list[Entry] = []
    keys: list[tuple[str, str]] = []  # the model's state_dict: each key, and the name of the tensor that it is


class Push(_OfReplica, frozen=True, kw_only=True):
    """The gradient of a ticket. Body: coded by `wire`, chunk after chunk; empty if it lies in shared memory."""

    ticket: int
    wire: str
    untouched: list[int] = []  # slots of this server without a gradient
    shared: bool = False
    marks: bool = False  # sent during backward: instead of `untouched`, a byte for each slot after the gradient
    rows: list[int] = []  # for each table how many rows: at the end of the body, their numbers and their gradients


class Pull(_OfContainer, frozen=True, kw_only=True):
    """The parameters after at least `at_least` steps. Reply's body: coded by `wire`."""

    replica: int  # its place
    at_least: int
    wire: str


class Look(_OfContainer, frozen=True, kw_only=True):
    """The parameters after at least `at_least` steps, to compute with and not to train on. Reply's body: all of them,
    or nothing if they are those after `known` steps."""

    at_least: int
    known: int | None = None


class PullRows(_OfContainer, frozen=True, kw_only=True):
    """Rows of a table after at least `at_least` steps. Body: their numbers on this server. Reply's body: values."""

    table: int
    at_least: int = 0


class PutRows(_OfContainer, frozen=True, kw_only=True):
    """Values for a run of a table's rows: of the weight (no key), or of the optimizer's state. Body: the values."""

    table: int
    start: int
    rows: int
    key: str = ""
    steps: int | None = None  # updates the table has seen


class Ask(_OfReplica, frozen=True, kw_only=True):
    """A replica asks the chief for work in its chapter."""

    chapter: int
    length: int
    batch_size: int
    left_out: int
    stop_epoch: int
    at_once: bool = False  # answer now, also if there is nothing to do yet
    call: ScriptCall | None = None  # in which it asks: the same in all replicas


class Report(_OfReplica, frozen=True, kw_only=True):
    """The gradient of a ticket is with all servers. Body: the model's buffers."""

    ticket: int
    pulled: int
    loss: LossPart
    options: list[dict[str, Option]]
    ask: Ask | None = None  # for what comes next, if it is there when this is settled


class GiveBack(_OfReplica, frozen=True, kw_only=True):
    """A replica will not compute that ticket, not now."""

    ticket: int


class Task(_OfReplica, frozen=True, kw_only=True):
    """A replica has come to a task."""

    key: TaskKey
    length: int
    call: ScriptCall | None = None  # of an evaluation: the same in all replicas
    at_once: bool = False  # it does not wait here for those who are at it


class TaskDone(_OfReplica, frozen=True, kw_only=True):
    """It has done a part of it."""

    key: TaskKey
    part: int
    values: list[float]


class TaskGivenBack(_OfReplica, frozen=True, kw_only=True):
    """It will not do its part of it, not now."""

    key: TaskKey


class Leave(_OfReplica, frozen=True, kw_only=True):
    """A replica has ended; said by itself, or by its supervisor."""


class Stop(_OfContainer, frozen=True, kw_only=True):
    """Let the run end after the step in progress."""


class SetRule(_OfContainer, frozen=True, kw_only=True):
    rule: Rule


class ReadBuffers(_OfContainer, frozen=True, kw_only=True):
    """The merged buffers of the last step, or the parameters that are not trained. Reply's body: those."""

    frozen: bool = False


class Describe(_OfContainer, frozen=True, kw_only=True):
    """What a container holds, how it is spread, who trains it."""


class Freeze(_OfContainer, frozen=True, kw_only=True):
    """Keep a copy of everything as it is after some step; said to the chief, and by it to the other servers."""

    number: int = 0  # of the copy; the chief chooses it


What = Literal["parameters", "state", "extras", "table", "sums", "rows"]


class ReadFrozen(_OfContainer, frozen=True, kw_only=True):
    """Read from such a copy. The last two are of the last step, and of no copy: the gradients of parameters, while
    recording, and of a table's rows."""

    what: What
    number: int = 0
    table: int = 0


class Thaw(_OfContainer, frozen=True, kw_only=True):
    """That copy has been read."""

    number: int


class Restore(_OfContainer, frozen=True, kw_only=True):
    """Take over parameters (body, first), optimizer state (body, then), and where the training stands."""

    step: int
    entries: list[tuple[int, str, str, tuple[int, ...]]]  # slot, key, type, shape of each state tensor in the body
    numbers: list[tuple[int, str, float]] = []
    born: list[int] = []  # slots that have state
    books: Books | None = None  # the chief's; None for other servers
    buffers: bool = False  # for the chief: the body ends with the model's buffers and what is not trained


class ReadBooks(_OfContainer, frozen=True, kw_only=True):
    """The chief's books: as they are now, or as they were when a copy was frozen."""

    number: int | None = None  # of the copy


class Apply(_OfContainer, frozen=True, kw_only=True):
    """The chief tells another server to make a step. First it may ask for the squared length of the gradient."""

    close: Close
    options: list[dict[str, Option]]
    measure: bool = False
    scale: float = 1.0


class Containers(_Request, frozen=True, kw_only=True):
    """What there is."""


class Drop(_OfContainer, frozen=True, kw_only=True):
    """Forget a container. Its chief refuses while replicas are there, unless forced."""

    force: bool = False


class Vacate(_OfContainer, frozen=True, kw_only=True):
    """The chief tells another server that nobody is in these places any more."""

    places: list[int]


class Copy(_OfContainer, frozen=True, kw_only=True):
    """Make another container out of one, all at one step; said to the chief, and by it to the other servers."""

    to: str
    number: int = 0  # of the frozen copy to take; the chief makes it


class KeepWhole(_OfShare, frozen=True, kw_only=True):
    """A server has the next one keep a copy of its share of a container. Body: the tensors of a snapshot."""

    entries: list[Entry]
    notes: ShareNotes


class Keep(_OfShare, frozen=True, kw_only=True):
    """What has happened to it since. Body: the records' bodies, one after another. Without records: is it there?"""

    position: int  # how many records came before these, since the snapshot
    records: list[AnyRecord] = []
    lengths: list[int] = []  # of the bodies


class Fetch(_OfShare, frozen=True, kw_only=True):
    """A server that was started again wants its share back."""


class Forget(_OfShare, frozen=True, kw_only=True):
    """That copy is not needed any more."""


Greeting = Hello | Proof
OfReplica = (
    Open | Fill | Push | Pull | PullRows | PutRows | Ask | Report | GiveBack | Task | TaskDone | TaskGivenBack | Leave
)
OfTraining = Stop | SetRule | Freeze | Thaw | Restore | Apply | Drop | Copy | Vacate  # as a whole
Reading = ReadBuffers | Look | Describe | ReadFrozen | ReadBooks | Containers
OfAnotherServer = KeepWhole | Keep | Fetch | Forget  # about its share
Request = Greeting | OfReplica | OfTraining | Reading | OfAnotherServer
REQUESTS = msgspec.msgpack.Decoder(Request)
