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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import msgspec
import torch

from paceline.central.chief.books import Books
from paceline.central.client.whole_tensors import WholeTensors
from paceline.central.messages import replies, requests
from paceline.central.messages.connection import FIRST_CONTACT_S, Connection
from paceline.central.shards import Shards
from paceline.checkpoint.model_file import write_plain_model
from paceline.checkpoint.tensor_file import CONTAINER_KEY, CONTAINER_STEP_KEY, check_storable, put_tensors
from paceline.errors import PacelineError
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
    runs: list[replies.RunListing]  # that are there; the fields above, and the books, are of the one that came last
    addresses: list[str]
    bytes_by_server: list[int]
    tensors: list[TensorSummary]
    books: Books


class Reader:
    """Reads from servers. For one thread at a time."""

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
        """Return all containers of the given servers. What lies on several of them is added up."""
        found: dict[str, replies.Listing] = {}
        for connection in self._given:
            for listed in connection.call(requests.Containers(), replies.Listed).containers:
                other = found.get(listed.name, listed)
                chief = listed if listed.rule else other  # only the chief knows how it is trained
                size = listed.bytes + (other.bytes if other is not listed else 0)
                found[listed.name] = msgspec.structs.replace(chief, bytes=size)
        return [found[name] for name in sorted(found)]

    def summary(self) -> Summary:
        """Return everything about the container but its values."""
        servers, chief = self._servers()
        shards = Shards(chief.spec)
        on = {name: tuple(sorted({part.server for part in parts})) for name, parts in shards.parts.items()}
        tensors = [
            TensorSummary(tensor.name, tensor.shape, tensor.dtype, True, on[tensor.name])
            for tensor in chief.spec.tensors
        ]
        everywhere = tuple(range(len(servers)))
        tensors += [
            TensorSummary(table.name, (table.rows, table.width), "float32", True, everywhere)
            for table in chief.spec.tables
        ]
        tensors += [
            TensorSummary(name, shape, dtype, False, (0,)) for name, dtype, shape in (*chief.frozen, *chief.buffers)
        ]
        tables = [
            sum(len(range(server, table.rows, len(servers))) * table.width * 4 for table in chief.spec.tables)
            for server in everywhere
        ]
        return Summary(
            name=self._name,
            step=chief.step,
            optimizer=chief.spec.optimizer.name,
            rule=chief.rule,
            accepting=chief.accepting,
            replicas=chief.members,
            runs=chief.runs,
            addresses=[server.address for server in servers],
            bytes_by_server=[layout.bytes + rows for layout, rows in zip(shards.layouts, tables, strict=True)],
            tensors=tensors,
            books=servers[0].call(requests.ReadBooks(container=self._name), replies.BooksRead).books,
        )

    @property
    def _name(self) -> str:
        if self.container is None:
            raise PacelineError("no container was named: give its name")
        return self.container

    def _servers(self) -> tuple[list[Connection], replies.Described]:
        """Return connections to all servers of the container in its own order, and what its chief says of it."""
        found: dict[int, Connection] = {}
        refusal: PacelineError | None = None
        known: replies.Described | None = None
        for connection in self._given:
            try:
                known = self._describe(connection)
                found[known.server] = connection
            except PacelineError as error:
                refusal = refusal or error
        if known is None:
            assert refusal is not None
            raise refusal
        for number, address in enumerate(known.addresses):
            if number not in found:
                found[number] = self._connection(address)
                self._given.append(found[number])
        return [found[number] for number in sorted(found)], self._describe(found[0])

    def _describe(self, connection: Connection) -> replies.Described:
        described: replies.Described = connection.call(requests.Describe(container=self._name), replies.Described)
        return described

    # ── values ───────────────────────────────────────────────────────────────────────────────────────────

    def step(self) -> int:
        """Return after how many steps the container is now."""
        return int(self._servers()[1].step)

    def parameters(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Return the step, and the tensors after it under the keys of the model's state_dict."""
        servers, chief = self._servers()
        whole = WholeTensors(servers, Shards(chief.spec), self._name)
        copy = whole.freeze()
        try:
            tensors = {**whole.extras(copy), **whole.parameters(copy)}
            for number, table in enumerate(chief.spec.tables):
                tensors[table.name], _ = whole.table(copy, number)
        finally:
            with contextlib.suppress(PacelineError):  # whatever is not let go makes room for later copies
                whole.thaw(copy)
        if not chief.keys:
            raise PacelineError(f"container {self._name!r} is empty: no replica has filled it yet")
        return copy.step, {key: tensors[name] for key, name in chief.keys}

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write a consistent version as a safetensors file, all of it or nothing; return the step it is of."""
        step, tensors = self.parameters()
        write_plain_model(path, "container", tensors, self._notes(step))
        return step

    def save_into(self, file: BinaryIO) -> int:
        """Write the same into a file that is open and empty; return the step it is of."""
        step, tensors = self.parameters()
        check_storable("container", tensors)
        put_tensors(file, tensors, lambda _: {"format": "pt", **self._notes(step)})
        return step

    def _notes(self, step: int) -> dict[str, str]:
        return {CONTAINER_KEY: self._name, CONTAINER_STEP_KEY: str(step)}

    # ── the container as a whole ─────────────────────────────────────────────────────────────────────────

    def copy(self, to: str) -> None:
        """Make another container, on the same servers, as this one is after some step."""
        servers, _ = self._servers()
        servers[0].call(requests.Copy(container=self._name, to=to), replies.Done)

    def drop(self, *, force: bool = False) -> None:
        """Forget the container on all its servers; refused while replicas are there, unless forced."""
        servers, _ = self._servers()
        for server in servers:  # the chief first: it knows who is there
            server.call(requests.Drop(container=self._name, force=force), replies.Done)
