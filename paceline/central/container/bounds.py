"""What a request may ask for: numbers that come over a wire are looked at here, before they are used.

Frames are of a fixed schema (`net/frames.py`), so a field is of its type; whether it makes sense is another
question. Whoever has shown the token is a friend, but a friend's bug, or a version in between, must not bring down a
server on which others train: what is out of bounds is refused with a sentence, and nothing has changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.central.chief.books import Books
from paceline.central.chief.chief import Chief
from paceline.central.chief.tickets import Close
from paceline.central.messages.notes import RunNotes, ShareNotes
from paceline.central.messages.records import AnyRecord, ChapterShape, Made, MembersChanged, PulledCopy, Pushed, RowsPut
from paceline.central.messages.requests import Ask, Open
from paceline.central.messages.settings import Settings
from paceline.central.shards import DTYPES, MAP_VERSION, Option, Spec
from paceline.errors import InvalidInput, PacelineError
from paceline.loss_value import LossPart
from paceline.rules import Sync
from paceline.run_place import check_container
from paceline.strategy import DURABILITIES, MOST_SERVERS, MOST_TIMEOUT_S, one_of

if TYPE_CHECKING:
    from paceline.central.container.container import Container

MOST_REPLICAS = 1 << 14
MOST_PLACES = 1 << 16  # of all runs in one container
MOST_BYTES = 1 << 40  # of all parameters together
MOST_CHAPTERS = 1 << 16
MOST_EPOCHS = 1 << 20
MOST_COUNT = 1 << 53  # of steps, samples: whatever is counted one by one
MOST_INCARNATION = (1 << 63) - 1

_NUMBERS = (int, float)


def check_place(replica: int, replicas: int) -> None:
    if not 0 <= replica < replicas:
        raise PacelineError(f"replica is {replica}: this run has {replicas}")


def check_count(field: str, value: int, most: int = MOST_COUNT, least: int = 0) -> None:
    if not least <= value <= most:
        raise InvalidInput(field, value, f"give a number from {least} to {most}")


def check_open(request: Open) -> None:
    """Before anything is allocated for a container."""
    check_container(request.container)
    settings = request.settings
    check_settings(settings)
    check_place(request.replica, settings.replicas)
    check_count("incarnation", request.incarnation, MOST_INCARNATION)
    if request.first is not None:
        check_count("place", request.first, MOST_PLACES - settings.replicas)
    if settings.durability == "replica" and request.spec.servers < 2:
        raise InvalidInput("durability", "replica", "it needs another server, give 2 or more, or log")
    check_spec(request.spec)
    if len(request.addresses) != request.spec.servers or not 0 <= request.server < request.spec.servers:
        raise PacelineError(
            f"server {request.server} of {len(request.addresses)} addresses does not fit the {request.spec.servers} "
            "servers of the container"
        )
    if request.checks and len(request.checks) != len(request.spec.tensors):
        raise PacelineError(f"{len(request.checks)} checksums do not fit {len(request.spec.tensors)} parameters")


def check_settings(settings: Settings) -> None:
    check_count("replicas", settings.replicas, MOST_REPLICAS, 1)
    for field, value in (("warmup-steps", settings.warmup_steps), ("warmup-epochs", settings.warmup_epochs)):
        check_count(field, value)
    one_of("durability", settings.durability, DURABILITIES)
    if not 0 < settings.timeout_s <= MOST_TIMEOUT_S:
        raise InvalidInput("timeout", settings.timeout_s, "give a number of seconds above 0")
    if settings.clip_norm is not None and not settings.clip_norm > 0:
        raise InvalidInput("clip_norm", settings.clip_norm, "give a number above 0, or None")


def check_spec(spec: Spec) -> None:
    if spec.map_version != MAP_VERSION:
        raise PacelineError(
            f"parameters are spread by map {spec.map_version} and this server knows {MAP_VERSION}: use the same version"
        )
    check_count("servers", spec.servers, MOST_SERVERS, 1)
    groups, total = len(spec.optimizer.groups), 0
    names: set[str] = set()
    for tensor in spec.tensors:
        if tensor.dtype not in DTYPES:
            raise InvalidInput(tensor.name, tensor.dtype, f"servers hold {', '.join(DTYPES)}")
        if any(extent < 0 for extent in tensor.shape):
            raise InvalidInput(tensor.name, tensor.shape, "a shape has no numbers below 0")
        total += math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
        _check_group(tensor.name, tensor.group, groups, names)
    for table in spec.tables:
        check_count(table.name, table.rows, MOST_COUNT)
        check_count(table.name, table.width, MOST_COUNT, 1)
        total += table.rows * table.width * 4
        _check_group(table.name, table.group, groups, names)
    if total > MOST_BYTES:
        raise PacelineError(f"{total / 2**30:,.0f} GiB of parameters are more than a container holds")


def _check_group(name: str, group: int, groups: int, names: set[str]) -> None:
    if not 0 <= group < groups:
        raise InvalidInput(name, group, f"the optimizer has {groups} groups")
    if name in names:
        raise InvalidInput("tensor", name, "it is there twice")
    names.add(name)


def check_ask(request: Ask) -> None:
    _check_chapter(request.chapter, request.length, request.batch_size, request.left_out)
    check_count("epochs", request.stop_epoch, MOST_EPOCHS)


def _check_chapter(number: int, length: int, batch_size: int, left_out: int) -> None:
    check_count("chapter", number, MOST_CHAPTERS)
    check_count("dataset length", length)
    check_count("batch_size", batch_size, least=1)
    check_count("left_out", left_out, length)


def check_options(options: Sequence[Mapping[str, Option]], groups: Sequence[Mapping[str, Option]]) -> None:
    """Options of a step, against those the container was made with: numbers may change, nothing else does."""
    if len(options) != len(groups):
        raise PacelineError(f"{len(options)} groups of options do not fit {len(groups)}")
    for given, known in zip(options, groups, strict=True):
        if given is known or given == known:
            continue
        for key, value in given.items():
            if key == "initial_lr" and _is_number(value):
                continue  # a scheduler's, made after the trainer
            if key not in known or not _alike(value, known[key]):
                raise PacelineError(f"the optimizer's {key} cannot be {value!r} in this container")
        if missing := sorted(known.keys() - given.keys()):
            raise PacelineError(f"the optimizer's {missing[0]} is missing")


def check_loss(part: LossPart) -> None:
    """The loss of a ticket: a diverged one is none of our business, what it is divided by is."""
    if part.loss is None:
        raise PacelineError("a ticket was reported without a loss")
    if not (math.isfinite(part.unit) and part.unit > 0):
        raise InvalidInput("unit", part.unit, "give a number above 0")
    for counted in (part.loss, *part.logged.values()):
        if counted.count is not None and not (math.isfinite(counted.count) and counted.count >= 0):
            raise InvalidInput("count", counted.count, "give a number from 0 up")


def _alike(value: Option, known: Option) -> bool:
    if isinstance(value, list) and isinstance(known, list):
        return len(value) == len(known)
    return value == known or (_is_number(value) and _is_number(known))


def _is_number(value: Option) -> bool:
    return isinstance(value, _NUMBERS) and not isinstance(value, bool)


def check_notes(notes: ShareNotes, name: str, server: int) -> None:
    """The notes of a copy of that share, before anything is allocated for it."""
    spec = notes.spec
    check_container(name)
    check_spec(spec)
    check_settings(notes.settings)
    if (notes.name, notes.server) != (name, server) or not 0 <= server < spec.servers:
        raise PacelineError(f"this is no copy of server {server}'s share of container {name!r}")
    if (notes.chief is not None) != (server == 0):
        raise PacelineError(f"server {server} is {'' if server == 0 else 'not '}the chief, whatever its copy says")
    if notes.chief is not None and not notes.chief.runs:
        raise PacelineError("no run has ever trained it, whatever its copy says")
    if len(notes.addresses) != spec.servers:
        raise PacelineError(f"{len(notes.addresses)} addresses do not fit {spec.servers} servers")
    check_count("step", notes.step)
    if len(notes.table_steps) != len(spec.tables):
        raise PacelineError(f"steps of {len(notes.table_steps)} tables do not fit {len(spec.tables)}")
    for steps in notes.table_steps:
        check_count("steps of a table", steps)
    for incarnation in notes.incarnations.values():
        check_count("incarnation", incarnation, MOST_INCARNATION)
    for pushed in notes.waiting:
        _check_rows(pushed.rows, len(spec.tables))
    places = [range(MOST_PLACES)]
    if notes.chief is not None:
        places = [_checked_places(run) for run in notes.chief.runs]
    for place in (*notes.incarnations, *notes.used, *(pushed.replica for pushed in notes.waiting)):
        if not any(place in of_run for of_run in places):
            raise PacelineError(f"place {place} is of no run, whatever its copy says")


def _checked_places(run: RunNotes) -> range:
    """Return the places of a run, whose notes make sense."""
    check_settings(run.settings)
    check_count("place", run.first, MOST_PLACES - run.settings.replicas)
    _check_members(run.members, run.settings.replicas)
    check_books(run.books)
    return range(run.first, run.first + run.settings.replicas)


def check_record(record: AnyRecord, container: Container) -> None:
    """What has happened to another server's share, before it happens to the copy of that."""
    match record:
        case Pushed():
            check_count("place", record.replica, MOST_PLACES - 1)
            check_count("incarnation", record.incarnation, MOST_INCARNATION)
            _check_rows(record.rows, len(container.tables))
        case PulledCopy():
            check_count("place", record.replica, MOST_PLACES - 1)
        case RowsPut():
            if not 0 <= record.table < len(container.tables):
                raise PacelineError(f"table {record.table} does not exist: there are {len(container.tables)}")
            check_count("start", record.start)
            check_count("steps of a table", record.steps or 0)
        case Made():
            check_options(record.options, container.spec.optimizer.groups)
            if record.chapter is not None:
                _check_counted(record.close, record.chapter)
        case MembersChanged():
            _check_members(record.members, MOST_REPLICAS)


def _check_members(members: Mapping[int, int], replicas: int) -> None:
    for replica, incarnation in members.items():
        check_place(replica, replicas)
        check_count("incarnation", incarnation, MOST_INCARNATION)


def _check_rows(counts: Sequence[int], tables: int) -> None:
    if len(counts) not in (0, tables) or min(counts, default=0) < 0:
        raise PacelineError(f"rows {list(counts)} do not fit {tables} tables")


def _check_counted(close: Close, chapter: ChapterShape) -> None:
    """The samples of a step, as the books will have them."""
    _check_chapter(close.chapter, *chapter)
    for accepted in close.accepted:
        check_count("epochs", accepted.epoch, MOST_EPOCHS)
        for start, stop in accepted.runs:
            check_count("sample", stop, chapter[0])
            check_count("sample", start, stop)


def check_books(books: Books) -> None:
    """Whether a chief can go on with these books."""
    check_count("step", books.step)
    check_count("next_ticket", books.next_ticket)
    for number, chapter in books.chapters.items():
        check_count("chapter", number, MOST_CHAPTERS)
        check_count("dataset length", chapter.length)
        check_count("used", chapter.used, chapter.length)
        check_count("batch_size", chapter.batch_size, least=1)
        for epoch in (chapter.began, *(epoch for epoch, _, _ in chapter.counted)):
            check_count("epochs", epoch, MOST_EPOCHS)
    try:
        Chief(Sync(), 1).load(books)
    except ValueError as error:  # samples that are counted twice
        raise PacelineError(f"these are no books of a training ({error})") from error
