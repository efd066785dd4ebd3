"""Everything that servers hold of a container, as whole tensors: read from a frozen copy, or given to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.central.chief.books import Books
from paceline.central.client.server_view import ServerView, into, slot_of
from paceline.central.shards import Shards
from paceline.central.tables.embedding import Lookup
from paceline.central.wire import replies, requests
from paceline.central.wire.connection import Connection
from paceline.central.wire.tensor_bytes import bytes_of, named_tensors, type_name
from paceline.net.frames import Channel

ROWS_AT_ONCE = 1 << 18  # of a table, in one request

State = dict[str, Any]  # of one parameter


class WholeTensors:
    """What one replica reads from the servers, and gives to them."""

    def __init__(
        self,
        sides: Sequence[ServerView],
        shards: Shards,
        parameters: Mapping[str, torch.Tensor],
        tables: Sequence[Lookup],
        others: Sequence[torch.Tensor],
        container: str,
    ) -> None:
        """`others`: the model's buffers, and the parameters that are not trained."""
        self._sides = sides
        self._shards = shards
        self._parameters = parameters
        self._tables = tables
        self._others = others
        self._container = container

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────

    def freeze(self) -> int:
        """Have all servers keep a copy of everything after one and the same step; its number."""
        return int(self._sides[0].connection.call(requests.Freeze(container=self._container), replies.Copied).number)

    def thaw(self, copy: int) -> None:
        for side in self._sides:
            side.connection.call(requests.Thaw(container=self._container, number=copy), replies.Done)

    def parameters(self, copy: int) -> dict[str, torch.Tensor]:
        """By name, of a frozen copy."""
        return self._read(requests.ReadFrozen(container=self._container, number=copy, what="parameters"))[0]

    def books(self, copy: int) -> Books:
        """The chief's, of a frozen copy."""
        request = requests.ReadBooks(container=self._container, number=copy)
        read: replies.BooksRead = self._sides[0].connection.call(request, replies.BooksRead)
        return read.books

    def state(self, copy: int) -> dict[str, State]:
        """The optimizer's, by parameter name, of a frozen copy."""
        by_slot = [self._state_of(side, copy) for side in self._sides]
        found: dict[str, State] = {}
        for name, parameter in self._parameters.items():
            for part in self._shards.parts[name]:
                for key, value in by_slot[part.server].get(part.slot, {}).items():
                    state = found.setdefault(name, {})
                    if self._shards.whole or not isinstance(value, torch.Tensor) or value.dim() == 0:
                        state[key] = value  # one for the whole tensor
                    else:
                        whole = state.setdefault(key, torch.empty(parameter.shape, dtype=value.dtype))
                        whole.view(-1)[part.start : part.stop] = value
        return found

    def _state_of(self, side: ServerView, copy: int) -> dict[int, State]:
        states: dict[int, State] = {}
        request = requests.ReadFrozen(container=self._container, number=copy, what="state")
        for flat_name, value in _entries(side, request).items():
            slot, _, key = flat_name.partition("/")
            states.setdefault(int(slot), {})[key] = value
        return states

    def table(self, copy: int, table: int) -> tuple[torch.Tensor, State]:
        """A table and its optimizer state, of a frozen copy."""
        lookup = self._tables[table]
        found: State = {}
        for number, side in enumerate(self._sides):
            request = requests.ReadFrozen(container=self._container, number=copy, what=f"table {table}")
            for key, value in _entries(side, request).items():
                if isinstance(value, torch.Tensor):
                    whole = found.setdefault(key, torch.empty(lookup.rows, lookup.width))
                    whole[number :: len(self._sides)] = value
                else:
                    found[key] = value
        weight = found.pop("")
        steps = found.pop("steps", 0.0)
        if found or steps:
            found["step"] = torch.tensor(float(steps))
        return weight, found

    def gradients(self) -> dict[str, torch.Tensor]:
        """The summed gradients of the last step, of those parameters that have one (while recording)."""
        gradients, told = self._read(requests.ReadFrozen(container=self._container, number=0, what="sums"))
        touched = [{int(slot) for slot, _, _ in reply.entries} for reply in told]
        return {
            name: gradient
            for name, gradient in gradients.items()
            if any(part.slot in touched[part.server] for part in self._shards.parts[name])
        }

    def table_gradient(self, table: int) -> torch.Tensor:
        """The summed gradient of the last step, as a whole table."""
        lookup = self._tables[table]
        whole = torch.zeros(lookup.rows, lookup.width)
        for number, side in enumerate(self._sides):
            found = _entries(side, requests.ReadFrozen(container=self._container, number=0, what=f"rows {table}"))
            whole[found["ids"] * len(self._sides) + number] = found["values"]
        return whole

    def _read(self, request: requests.ReadFrozen) -> tuple[dict[str, torch.Tensor], list[replies.Tensors]]:
        flats: list[torch.Tensor] = []
        told: list[replies.Tensors] = []
        for side in self._sides:
            flat = torch.empty(side.layout.bytes, dtype=torch.uint8)
            told.append(side.connection.call(request, replies.Tensors, read=into(flat)))
            flats.append(flat)
        found = {}
        for name, parameter in self._parameters.items():
            whole = torch.empty(parameter.shape, dtype=parameter.dtype)
            for part in self._shards.parts[name]:
                values = slot_of(flats[part.server], self._sides[part.server].layout, part.slot)
                whole.view(-1)[part.start : part.stop] = values
            found[name] = whole
        return found, told

    # ── giving ───────────────────────────────────────────────────────────────────────────────────────────

    def flat(self, number: int, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A server's flat buffer with these values."""
        layout = self._sides[number].layout
        flat = torch.zeros(layout.bytes, dtype=torch.uint8)
        for name in self._shards.names:
            values = parameters[name].detach().reshape(-1)
            for part in self._shards.parts[name]:
                if part.server == number:
                    slot_of(flat, layout, part.slot).copy_(values[part.start : part.stop])
        return flat

    def restore(
        self, parameters: Mapping[str, torch.Tensor], states: Mapping[str, State], books: Books | None = None
    ) -> None:
        """Give all servers these values, and the chief its books; without any, of the beginning."""
        for number, side in enumerate(self._sides):
            entries: list[tuple[int, str, str, tuple[int, ...]]] = []
            numbers: list[tuple[int, str, float]] = []
            born: list[int] = []
            body = [bytes_of(self.flat(number, parameters))]
            for name, parameter in self._parameters.items():
                for part in (part for part in self._shards.parts[name] if part.server == number):
                    for key, value in states.get(name, {}).items():
                        if not isinstance(value, torch.Tensor):
                            numbers.append((part.slot, key, float(value)))
                            continue
                        own = value.detach()
                        if (own.shape == parameter.shape and own.numel() > 1) or own.numel() == parameter.numel() > 1:
                            own = own.reshape(-1)[part.start : part.stop]
                        own = own.contiguous()
                        entries.append((part.slot, key, type_name(own), tuple(own.shape)))
                        body.append(bytes_of(own))
                    if states.get(name):
                        born.append(part.slot)
            request = requests.Restore(
                container=self._container,
                step=books.step if books is not None else 0,
                entries=entries,
                numbers=numbers,
                born=born,
                books=books if number == 0 else None,
                buffers=books is not None and number == 0,
            )
            if request.buffers:
                body += [bytes_of(tensor) for tensor in self._others]
            side.connection.call(request, replies.Done, body=lambda body=body: body)  # type: ignore[misc]

    def give_table(self, table: int, weight: torch.Tensor, state: State) -> None:
        """A whole table and its optimizer state, as `table` has them."""
        self.put_rows(table, "", weight, int(state.get("step", 0)))
        for key, value in state.items():
            if key != "step":
                self.put_rows(table, key, value)

    def put_rows(self, table: int, key: str, values: torch.Tensor, steps: int | None = None) -> None:
        """Give the servers a value for every row: of the weight (no key), or of the optimizer's state."""
        for number, side in enumerate(self._sides):
            own = values[number :: len(self._sides)]
            for start in range(0, len(own), ROWS_AT_ONCE):
                part = own[start : start + ROWS_AT_ONCE].contiguous()
                request = requests.PutRows(
                    container=self._container, table=table, start=start, rows=len(part), key=key, steps=steps
                )
                side.connection.call(request, replies.Done, body=lambda part=part: [bytes_of(part)])  # type: ignore[misc]


def read_bytes(connection: Connection, request: requests.Request) -> tuple[replies.Tensors, bytearray]:
    """A reply, and its body as it is."""
    body = bytearray()

    def read(channel: Channel[replies.Reply], length: int) -> None:
        body[:] = channel.read_whole_body(length)

    return connection.call(request, replies.Tensors, read=read), body


def _entries(side: ServerView, request: requests.ReadFrozen) -> dict[str, Any]:
    """Named tensors and numbers of a copy."""
    reply, body = read_bytes(side.connection, request)
    return {**named_tensors(reply.entries, body), **dict(reply.numbers)}
