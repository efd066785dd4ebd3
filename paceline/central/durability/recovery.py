"""How a server that was killed comes back: a snapshot, and then again, one by one, what its journal has since.

With `--durability log` both are in its folder. With `replica` another server has gone through the records already, and
gives the state itself.

Steps are made from the same gradients in the same order, so they come out the same, bit by bit. Gradients that were
acknowledged and are in no step yet lie in their places again. The chief's books are those of the last step; tickets
that were out with replicas are not in them, and are answered as late: their samples are free again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import quote, unquote

import torch

from paceline.central.container.bounds import check_notes, check_record
from paceline.central.container.container import Container
from paceline.central.container.runs import ContainerRuns, Share
from paceline.central.durability.log_journal import LogJournal
from paceline.central.durability.peer_journal import NOTE, Connect, KeptBy, PeerJournal, Say
from paceline.central.durability.record_file import ADVICE
from paceline.central.durability.snapshot import again, load, save
from paceline.central.messages.connection import Connection
from paceline.central.messages.notes import ShareNotes
from paceline.central.messages.replies import Kept, Missing
from paceline.central.messages.requests import Fetch
from paceline.central.messages.tensor_bytes import named_tensors
from paceline.central.shards import Shards
from paceline.errors import CheckpointError, PacelineError
from paceline.net.frames import printable

LOG, REPLICA = "log", "replica"  # durabilities

ToOthers = Callable[[Sequence[str], float], Sequence[Connection]]  # a chief's: addresses, timeout_s


def keep(share: Share, folder: Path | None, connect: Connect | None = None, say: Say = print) -> None:
    """Give a share a journal, if it is to have one."""
    container = share.container
    container.journal.move(container.addresses)
    durability = container.settings.durability
    if durability in (LOG, REPLICA) and not container.journal.keeps:
        if folder is None:
            raise PacelineError(f"durability is {durability!r}: this server has no folder for it; start it with --dir")
        path = folder / quote(container.name, safe="")
        if durability == LOG:
            container.journal = LogJournal(path, container_bytes=container.bytes)
        else:
            assert connect is not None
            kept_by = KeptBy(
                container.name, container.server, container.addresses, container.settings.timeout_s, time.time_ns()
            )
            container.journal = PeerJournal(path, kept_by, connect, say)
    container.journal.renew = partial(save, share, wait=False)


def recover(folder: Path, to_others: ToOthers, connect: Connect | None = None, say: Say = print) -> Iterator[Share]:
    """Yield every share that has a journal in `folder`, or a note there where its copy is."""
    for path in sorted(folder.iterdir()) if folder.exists() else []:
        if (path / NOTE).exists():
            assert connect is not None
            share: Share | None = _fetch(path, to_others, connect, say)
        else:
            share = _recover(path, to_others)
        if share is not None:
            if share.runs is not None:
                share.runs.go_on()
            yield share


def _recover(folder: Path, to_others: ToOthers) -> Share | None:
    journal = LogJournal(folder)
    read = journal.read_snapshot()
    if read is None:
        return None  # its process was killed before it had begun
    with _saying(f"{journal.newest_snapshot} cannot be gone on from"):
        share = rebuilt(*read, to_others, unquote(folder.name))
    try:
        journal.container_bytes = share.container.bytes
        for record, body in journal.records():
            with _saying(f"{journal.last_record} cannot be gone through"):
                check_record(record, share.container)
                again(share, record, body)
    except BaseException:
        share.close()
        raise
    share.container.journal = journal
    return share


def _fetch(folder: Path, to_others: ToOthers, connect: Connect, say: Say) -> Share:
    before = KeptBy.read(folder)
    kept_by = replace(before, incarnation=max(before.incarnation + 1, time.time_ns()))
    say(f"server {kept_by.server} takes its share of container {kept_by.container!r} back from server {kept_by.backup}")
    body = bytearray()
    with contextlib.closing(kept_by.connect(connect)) as link:
        kept: Kept | Missing = link.call(
            Fetch(**kept_by.whose),
            (Kept, Missing),
            read=lambda channel, length: body.extend(channel.read_whole_body(length)),
        )
    if isinstance(kept, Missing):
        raise PacelineError(
            f"the share of server {kept_by.server} of container {kept_by.container!r} is gone: "
            f"server {kept_by.backup}, which had its copy, has ended as well; remove {folder}, and go on from a "
            "checkpoint"
        )
    with _saying(f"{folder / NOTE} leads to server {kept_by.backup}, which gives back no share to go on from"):
        tensors = named_tensors(kept.entries, body)
        share = rebuilt(tensors, kept.notes, to_others, kept_by.container, kept_by.server)
    journal = share.container.journal = PeerJournal(folder, kept_by, connect, say)
    journal.resume(kept.position)
    return share


@contextlib.contextmanager
def _saying(what: str) -> Iterator[None]:
    """Have whatever goes wrong in here end in a sentence that begins so."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{what} ({printable(str(error)) or type(error).__name__}); {ADVICE}") from error


def rebuilt(
    tensors: Mapping[str, torch.Tensor],
    notes: ShareNotes,
    to_others: ToOthers,
    name: str,
    server: int | None = None,
) -> Share:
    """Return a share as a snapshot says, which must be of that container and, if it is known, of that server."""
    check_notes(notes, name, notes.server if server is None else server)
    given, needed = tensors["parameters"].nbytes, Shards(notes.spec).layouts[notes.server].bytes
    if given != needed:  # before room is made for what somebody only says that there is
        raise CheckpointError(f"parameters are {given} bytes and should be {needed}")
    container = Container(notes.name, notes.spec, notes.server, notes.settings)
    try:
        runs = None
        if notes.chief is not None:
            # No ticket that the process before has handed out has such a number.
            first_ticket = time.time_ns() // 1000
            others = to_others(notes.addresses, notes.settings.timeout_s)
            runs = ContainerRuns(container, others, first_ticket=first_ticket)
        share = Share(container, runs)
        load(share, tensors, notes)
        return share
    except BaseException:
        container.close()
        raise
