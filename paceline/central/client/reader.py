"""Reads what servers hold, without being a replica: lists containers, and takes a consistent version out of one.

A container is spread over servers, which go on training while it is read. So its chief has every server keep a copy
after one and the same step (*freeze*), the copies are read in peace, and let go (*thaw*). Whole tensors come out under
the keys of the model's own state_dict, with what is not trained: the file of `save` loads in plain torch.

    reader = Reader(["127.0.0.1:7070"], "digits", token=read_token(Path("servers/0")))
    step, tensors = reader.parameters()

One address is enough: each server of a container knows all of them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from paceline.central.chief.books import Books
from paceline.central.shards import ShardPart, Shards
from paceline.central.wire import replies, requests
from paceline.central.wire.connection import FIRST_CONTACT_S, Connection
from paceline.central.wire.tensor_bytes import bytes_of
from paceline.checkpoint.tensor_file import check_storable, write_tensors
from paceline.errors import CheckpointError, PacelineError
from paceline.memory.layout import FlatLayout
from paceline.net.frames import Channel
from paceline.net.secure import Keys
from paceline.rules import Rule

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class TensorSummary:
    """One tensor of a container, and where it lies."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool
    servers: tuple[int, ...]


@dataclass(frozen=True)
class Summary:
    """A container, as `show` tells it."""

    name: str
    step: int
    optimizer: str
    rule: Rule
    accepting: int  # gradients that make a step now
    replicas: list[int]  # that are there
    addresses: list[str]
    bytes_by_server: list[int]
    tensors: list[TensorSummary]
    books: Books


class Reader:
    """A visitor to servers. For one thread at a time."""

    def __init__(
        self,
        addresses: Sequence[str],
        container: str | None = None,
        *,
        token: str = "",
        keys: Keys | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.container = container
        self._token, self._keys, self._timeout_s = token, keys, timeout_s
        self._given = [self._connection(address) for address in addresses]

    def _connection(self, address: str) -> Connection:
        return Connection(
            address,
            token=self._token,
            keys=self._keys,
            who="the reader",
            name="the server",
            timeout_s=self._timeout_s,
            first_contact_s=FIRST_CONTACT_S,
        )

    def close(self) -> None:
        for connection in self._given:
            connection.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ── what there is ────────────────────────────────────────────────────────────────────────────────────

    def listing(self) -> list[replies.Listing]:
        """All containers of the servers whose addresses were given. What lies on several of them is added up."""
        found: dict[str, replies.Listing] = {}
        for connection in self._given:
            for listed in connection.call(requests.Containers(), replies.Listed).containers:
                other = found.get(listed.name, listed)
                chief = listed if listed.rule else other  # only the chief knows how it is trained
                size = listed.bytes + (other.bytes if other is not listed else 0)
                found[listed.name] = msgspec.structs.replace(chief, bytes=size)
        return [found[name] for name in sorted(found)]

    def summary(self) -> Summary:
        """Everything about the container but its values."""
        sides, described = self._sides()
        chief = described[0]
        shards = Shards(chief.spec)
        shapes = {tensor.name: tensor for tensor in chief.spec.tensors}
        tensors = [
            TensorSummary(
                name, shapes[name].shape, shapes[name].dtype, True, tuple(sorted({part.server for part in parts}))
            )
            for name, parts in sorted(shards.parts.items(), key=lambda item: list(shapes).index(item[0]))
        ]
        everywhere = tuple(range(len(sides)))
        tensors += [
            TensorSummary(table.name, (table.rows, table.width), "float32", True, everywhere)
            for table in chief.spec.tables
        ]
        tensors += [
            TensorSummary(name, shape, dtype, False, (0,)) for name, dtype, shape in (*chief.frozen, *chief.buffers)
        ]
        tables = [
            sum(len(range(server, table.rows, len(sides))) * table.width * 4 for table in chief.spec.tables)
            for server in everywhere
        ]
        return Summary(
            name=self._name,
            step=chief.step,
            optimizer=chief.spec.optimizer.name,
            rule=chief.rule,
            accepting=chief.accepting,
            replicas=chief.members,
            addresses=[side.address for side in sides],
            bytes_by_server=[layout.bytes + rows for layout, rows in zip(shards.layouts, tables, strict=True)],
            tensors=tensors,
            books=sides[0].call(requests.ReadBooks(container=self._name), replies.BooksRead).books,
        )

    @property
    def _name(self) -> str:
        if self.container is None:
            raise PacelineError("no container was named: give its name")
        return self.container

    def _sides(self) -> tuple[list[Connection], list[replies.Described]]:
        """Connections to all servers of the container in its own order, in whatever order they were given."""
        found: dict[int, tuple[Connection, replies.Described]] = {}
        refusal: PacelineError | None = None
        for connection in self._given:
            try:
                described = connection.call(requests.Describe(container=self._name), replies.Described)
                found[described.server] = (connection, described)
            except PacelineError as error:
                refusal = refusal or error
        if not found:
            assert refusal is not None
            raise refusal
        _, known = next(iter(found.values()))
        for number, address in enumerate(known.addresses):
            if number not in found:
                connection = self._connection(address)
                self._given.append(connection)
                found[number] = (
                    connection,
                    connection.call(requests.Describe(container=self._name), replies.Described),
                )
        ordered = [found[number] for number in sorted(found)]
        return [connection for connection, _ in ordered], [described for _, described in ordered]

    # ── values ───────────────────────────────────────────────────────────────────────────────────────────

    def parameters(self) -> tuple[int, dict[str, torch.Tensor]]:
        """The step, and the tensors after it under the keys of the model's state_dict."""
        sides, described = self._sides()
        chief = described[0]
        shards = Shards(chief.spec)
        with self._frozen(sides) as copied:
            flats = [
                _flat(side, requests.ReadFrozen(container=self._name, number=copied.number, what="parameters"), layout)
                for side, layout in zip(sides, shards.layouts, strict=True)
            ]
            extras = requests.ReadFrozen(container=self._name, number=copied.number, what="extras")
            tensors = _named(sides[0], extras)
            for number, table in enumerate(chief.spec.tables):
                whole = torch.empty(table.rows, table.width)
                for server, side in enumerate(sides):
                    what = requests.ReadFrozen(container=self._name, number=copied.number, what=f"table {number}")
                    whole[server :: len(sides)] = _named(side, what)[""]
                tensors[table.name] = whole
        for tensor in chief.spec.tensors:
            whole = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
            for part in shards.parts[tensor.name]:
                whole.view(-1)[part.start : part.stop] = _slot(flats[part.server], shards.layouts[part.server], part)
            tensors[tensor.name] = whole
        if not chief.keys:
            raise PacelineError(f"container {self._name!r} is empty: no replica has filled it yet")
        return copied.step, {key: tensors[name] for key, name in chief.keys}

    @contextlib.contextmanager
    def _frozen(self, sides: Sequence[Connection]) -> Iterator[replies.Copied]:
        copied: replies.Copied = sides[0].call(requests.Freeze(container=self._name), replies.Copied)
        try:
            yield copied
        finally:
            with contextlib.suppress(PacelineError):  # whatever is not let go makes room for later copies
                for side in sides:
                    side.call(requests.Thaw(container=self._name, number=copied.number), replies.Done)

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write a consistent version as a safetensors file, all of it or nothing; the step it is of."""
        target = Path(path)
        step, tensors = self.parameters()
        check_storable("container", tensors)
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        notes = {"format": "pt", "paceline.container": self._name, "paceline.step": str(step)}
        try:
            try:
                write_tensors(partial, tensors, lambda _: notes)
                partial.replace(target)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"{target} could not be written: {error.strerror or error}") from error
        return step

    # ── the container as a whole ─────────────────────────────────────────────────────────────────────────

    def copy(self, to: str) -> None:
        """Another container, on the same servers, as this one is after some step."""
        sides, _ = self._sides()
        sides[0].call(requests.Copy(container=self._name, to=to), replies.Done)

    def drop(self, *, force: bool = False) -> None:
        """Forget the container on all its servers; refused while replicas are there, unless forced."""
        sides, _ = self._sides()
        for side in sides:  # the chief first: it knows who is there
            side.call(requests.Drop(container=self._name, force=force), replies.Done)


def _flat(side: Connection, request: requests.ReadFrozen, layout: FlatLayout) -> torch.Tensor:
    flat = torch.empty(layout.bytes, dtype=torch.uint8)
    side.call(request, replies.Tensors, read=lambda channel, _: channel.read_body(bytes_of(flat)))
    return flat


def _named(side: Connection, request: requests.ReadFrozen) -> dict[str, torch.Tensor]:
    """Tensors with their names, in the order of the reply's entries."""
    body = bytearray()

    def read(channel: Channel[replies.Reply], length: int) -> None:
        body.extend(channel.read_whole_body(length))

    reply: replies.Tensors = side.call(request, replies.Tensors, read=read)
    found, offset = {}, 0
    for name, dtype, shape in reply.entries:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        bytes_of(tensor)[:] = memoryview(body)[offset : offset + tensor.nbytes]
        found[name] = tensor
        offset += tensor.nbytes
    return found


def _slot(flat: torch.Tensor, layout: FlatLayout, part: ShardPart) -> torch.Tensor:
    slot = layout.slots[part.slot]
    return flat[slot.offset : slot.offset + slot.bytes].view(slot.dtype)
