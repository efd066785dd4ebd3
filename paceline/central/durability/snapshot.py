"""Everything a container is, as plain tensors and notes; and how it comes out of them again.

A *snapshot* is all of it at one moment: parameters, the optimizer's state, tables, gradients that wait to be used, who
may push. What comes after it are *records* (`records.py`). Steps are made from the same gradients in the same order, so
they come out the same, bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.central.container.container import Container, FrozenCopy
from paceline.central.container.runs import Share
from paceline.central.container.step_maker import States
from paceline.central.messages.notes import ShareNotes
from paceline.central.messages.records import (
    AnyRecord,
    Made,
    MembersChanged,
    PulledCopy,
    Pushed,
    RowsPut,
    RuleSet,
    TaskResult,
    packed,
)
from paceline.central.tables.tables import Rows, TableCopy
from paceline.errors import CheckpointError

Tensors = dict[str, torch.Tensor]


def save(share: Share, *, wait: bool) -> None:
    """Have everything in a snapshot, and the journal go on from there."""
    journal = share.container.journal
    if journal.keeps:
        with share.between_steps(), share.container.lock, journal.lock:
            journal.snapshot(*whole(share), wait=wait)


def whole(share: Share) -> tuple[Tensors, ShareNotes]:
    """Return a snapshot, in memory of its own."""
    container = share.container
    tensors, chief = share.runs.whole() if share.runs is not None else ({}, None)
    with container.lock:
        copy, numbers = container.copy(), []
        tensors["parameters"] = copy.parameters
        for slot, state in copy.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"state/{slot}/{key}"] = value
                else:
                    numbers.append((slot, key, value))
        for number, table in enumerate(copy.tables):
            tensors[f"table/{number}/"] = table.weight
            tensors |= {f"table/{number}/{key}": value for key, value in table.state.items()}
        held = []
        for pushed, rows in waiting(container):
            parts = [container.arena.gradients[pushed.replica], *(part for given in rows for part in given.tensors)]
            tensors[f"waiting/{pushed.replica}"] = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
            held.append(pushed)
        return tensors, ShareNotes(
            name=container.name,
            server=container.server,
            addresses=container.addresses,
            spec=container.spec,
            settings=container.settings,
            step=copy.step,
            numbers=numbers,
            table_steps=[table.steps for table in copy.tables],
            waiting=held,
            incarnations=dict(container.incarnations),
            used=dict(container.used),
            chief=chief,
        )


def waiting(container: Container) -> list[tuple[Pushed, list[Rows]]]:
    """Return the gradients that are here and in no step yet."""
    return [
        (
            Pushed(
                replica=replica,
                incarnation=container.incarnations.get(replica, 0),
                ticket=ticket,
                untouched=(container.arena.touched[replica] == 0).nonzero().view(-1).tolist(),
                rows=[len(given.ids) for given in container.rows.get(replica, [])],
            ),
            container.rows.get(replica, []),
        )
        for replica, ticket in container.staged.items()
        if container.used.get(replica) != ticket
    ]


def load(share: Share, tensors: Mapping[str, torch.Tensor], notes: ShareNotes) -> None:
    """Become what a snapshot says."""
    container = share.container
    states: States = {}
    tables = [TableCopy(tensors[f"table/{n}/"], {}, steps) for n, steps in enumerate(notes.table_steps)]
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        number, _, key = rest.partition("/")
        if kind == "state":
            states.setdefault(int(number), {})[key] = tensor
        elif kind == "table" and key:
            tables[int(number)].state[key] = tensor
    for slot, key, value in notes.numbers:
        states.setdefault(slot, {})[key] = value
    container.maker.check_states(states)
    _check_alike("parameters", tensors["parameters"], container.arena.parameters)
    for table, copy in zip(container.tables, tables, strict=True):
        for key, tensor in (("", copy.weight), *copy.state.items()):
            _check_alike(f"{table.spec.name} {key}", tensor, table.weight)
    container.take_over(FrozenCopy(0, notes.step, tensors["parameters"], states, tables))
    container.addresses = notes.addresses
    for replica, incarnation in notes.incarnations.items():
        container.admit(replica, incarnation)
    container.used = dict(notes.used)
    for pushed in notes.waiting:
        _push_again(container, pushed, packed([tensors[f"waiting/{pushed.replica}"]])[0])
    container.forget_pulled()
    if share.runs is not None and notes.chief is not None:
        share.runs.load(tensors, notes.chief)


def _check_alike(name: str, given: torch.Tensor, held: torch.Tensor) -> None:
    if (given.shape, given.dtype) != (held.shape, held.dtype):
        what = [f"{tensor.dtype} of shape {tuple(tensor.shape)}" for tensor in (given, held)]
        raise CheckpointError(f"{name} is {what[0]} and should be {what[1]}")


def again(share: Share, record: AnyRecord, body: memoryview) -> None:
    """Have a record that came after the snapshot happen once more."""
    container = share.container
    match record:
        case Pushed():
            _push_again(container, record, body)
        case PulledCopy():
            container.check_place(record.replica)
            (parameters,) = _split(body, [container.bytes])
            container.arena.pulled[record.replica].copy_(parameters)
            container.not_pulled.discard(record.replica)
        case RowsPut():
            (values,) = _split(body, [len(body)])
            table = container.tables[record.table]
            rows = values.clone().view(torch.float32).view(-1, table.spec.width)
            if record.start + len(rows) > table.rows:
                raise CheckpointError(f"rows from {record.start} on of {table.spec.name} are {len(rows)}: no such")
            container.put_rows(record, rows)
        case Made():
            container.apply(record.close, record.options, record.scale, noted=True)
            container.forget_pulled()  # whatever corrects a step stands right before it
    if share.runs is not None and isinstance(record, Made | TaskResult | RuleSet | MembersChanged):
        share.runs.again(record, body)


def _push_again(container: Container, pushed: Pushed, body: memoryview) -> None:
    container.admit(pushed.replica, pushed.incarnation)
    place = container.arena.gradients[pushed.replica]
    counts = zip(pushed.rows, container.tables, strict=False)
    of_rows = [size for count, table in counts for size in (8 * count, 4 * table.spec.width * count)]
    given = _split(body, [place.nbytes, *of_rows])
    place.copy_(given[0])
    rows = [
        Rows(ids.clone().view(torch.int64), values.clone().view(torch.float32).view(-1, table.spec.width))
        for table, ids, values in zip(container.tables, given[1::2], given[2::2], strict=False)
    ]
    container.take_push(pushed, rows)


def _split(body: memoryview, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the bytes of a record's body, cut; they lie where they were read to."""
    if len(body) != sum(sizes):
        raise CheckpointError(f"a record in the log has {len(body)} bytes instead of {sum(sizes)}")
    found, start = [], 0
    for size in sizes:
        part = body[start : start + size]
        found.append(torch.frombuffer(part, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8))
        start += size
    return found
