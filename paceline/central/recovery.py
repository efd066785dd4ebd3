"""How a server that was killed comes back: the last snapshot, and then again, one by one, what its journal has since.

Steps are made from the same gradients in the same order, so they come out the same, bit by bit. Gradients that were
acknowledged and are in no step yet lie in their places again. The chief's books are those of the last step; tickets
that were out with replicas are not in them, and are answered as late: their samples are free again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from paceline.central.connection import Connection
from paceline.central.container import Container
from paceline.central.journal import Journal, Made, Pulled, Pushed, RowsPut
from paceline.central.protocol import Settings
from paceline.central.shards import Spec
from paceline.central.steps import Steps
from paceline.errors import PacelineError

LOG = "log"  # the durability that this is for


def keep(container: Container, folder: Path | None) -> None:
    """Give a new container a journal, if it is to have one."""
    if container.settings.durability != LOG or container.journal is not None:
        return
    if folder is None:
        raise PacelineError("durability is 'log': this server has no folder for it; start it with --dir")
    container.journal = Journal(folder / quote(container.name, safe=""))
    container.journal.container_bytes = container.bytes


def recover(
    folder: Path, connect: Callable[[Sequence[str], float], Sequence[Connection]]
) -> Iterator[tuple[Container, Steps | None]]:
    """Every container that has a journal in `folder`."""
    for path in sorted(folder.iterdir()) if folder.exists() else []:
        found = _recover(path, connect)
        if found is not None:
            yield found


def _recover(
    folder: Path, connect: Callable[[Sequence[str], float], Sequence[Connection]]
) -> tuple[Container, Steps | None] | None:
    journal = Journal(folder)
    read = journal.read_snapshot()
    if read is None:
        return None  # its process was killed before it had begun
    tensors, notes = read
    spec = msgspec.json.decode(notes["spec"], type=Spec)
    settings = msgspec.json.decode(notes["settings"], type=Settings)
    container = Container(notes["name"], spec, notes["server"], settings)
    journal.container_bytes = container.bytes
    container.load(tensors, notes)
    steps: Steps | None = None
    if container.server == 0:
        # No ticket that the process before has handed out has such a number.
        first_ticket = time.time_ns() // 1000
        steps = Steps(container, connect(container.addresses, settings.timeout_s), first_ticket=first_ticket)
        steps.load(tensors, notes["chief"])
    last: Made | None = None
    for record, body in journal.records():
        match record:
            case Pushed():
                container.push_again(record, body)
            case Pulled():
                container.pulled_again(record.replica, body)
            case RowsPut():
                container.put_rows_again(record, body)
            case Made():
                container.apply(record.close, record.options, record.scale, noted=True)
                last = record
                if steps is not None:
                    steps.again(record, body)
            case _:
                if steps is not None:
                    steps.again(record, body)
    container.forget_pulled()
    container.journal = journal
    if steps is not None:
        steps.go_on(last)
    return container, steps
