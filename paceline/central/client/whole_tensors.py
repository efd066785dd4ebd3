"""Everything that servers hold of a container, as whole tensors: read from a frozen copy, or given to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.central.chief.books import Books
from paceline.central.client.server_view import into, slot_of
from paceline.central.messages import replies, requests
from paceline.central.messages.connection import Connection
from paceline.central.messages.replies import Copied
from paceline.central.messages.tensor_bytes import bytes_of, named_tensors, type_name
from paceline.central.shards import DTYPES, Shards
from paceline.net.frames import Channel

ROWS_AT_ONCE = 1 << 18  # of a table, in one request
LOOKS = 4  # at servers that make steps meanwhile, before they are asked to keep a copy

State = dict[str, Any]  # of one parameter


class WholeTensors:
    """Reads a container from all its servers, and gives them values."""

    def __init__(
        self,
        servers: Sequence[Connection],
        shards: Shards,
        container: str,
        others: Sequence[torch.Tensor] = (),
    ) -> None:
        """`others`: what is given to the chief too, the model's buffers and the parameters that are not trained."""
        self._servers = servers
        self._shards = shards
        self._tables = shards.spec.tables
        self._container = container
        self._others = others
        self._flats: list[torch.Tensor] = []  # by server: what was looked at last
        self._flat_steps: list[int | None] = [None] * len(servers)  # after which step that was
        self._now: dict[str, torch.Tensor] = {}  # the parameters in there,
        self._known: int | None = None  # after this step

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────

    def freeze(self) -> Copied:
        """Have all servers keep a copy of everything after one and the same step; return which."""
        copied: Copied = self._servers[0].call(requests.Freeze(container=self._container), Copied)
        return copied

    def thaw(self, copy: Copied) -> None:
        """Let go of a copy that has been read."""
        for server in self._servers:
            server.call(requests.Thaw(container=self._container, number=copy.number), replies.Done)

    def parameters(self, copy: Copied) -> dict[str, torch.Tensor]:
        """Return the parameters of a frozen copy, by name."""
        return self._read(self._of(copy, "parameters"))[0]

    def parameters_now(self, at_least: int) -> dict[str, torch.Tensor]:
        """Return the parameters by name, all after one and the same step, and after at least so many."""
        for _ in range(LOOKS):
            steps = [self._look(number, at_least) for number in range(len(self._servers))]
            if len(set(steps)) == 1:
                if steps[0] != self._known:
                    self._now, self._known = self._whole(self._flats), steps[0]
                return self._now
            at_least = max(steps)  # a step was made meanwhile
        copy = self.freeze()  # they are made too fast
        found = self.parameters(copy)
        self.thaw(copy)
        return found

    def forget(self) -> None:
        """The parameters may be others than those that were looked at, after the same step."""
        self._known, self._flat_steps = None, [None] * len(self._servers)

    def _look(self, number: int, at_least: int) -> int:
        """Have what one server holds now; return after which step."""
        if not self._flats:
            self._flats = [torch.empty(layout.bytes, dtype=torch.uint8) for layout in self._shards.layouts]

        def read(channel: Channel[replies.Reply], length: int) -> None:
            if length:
                channel.read_body(bytes_of(self._flats[number]))

        request = requests.Look(container=self._container, at_least=at_least, known=self._flat_steps[number])
        step = int(self._servers[number].wait(request, replies.Pulled, read=read).step)
        self._flat_steps[number] = step
        return step

    def extras(self, copy: Copied) -> dict[str, torch.Tensor]:
        """Return the model's buffers and the parameters that are not trained, by name, of a frozen copy."""
        return _entries(self._servers[0], self._of(copy, "extras"))

    def books(self, copy: Copied) -> Books:
        """Return the chief's books, of a frozen copy."""
        request = requests.ReadBooks(container=self._container, number=copy.number)
        read: replies.BooksRead = self._servers[0].call(request, replies.BooksRead)
        return read.books

    def state(self, copy: Copied) -> dict[str, State]:
        """Return the optimizer's state, by parameter name, of a frozen copy."""
        by_slot = [self._state_of(server, copy) for server in self._servers]
        found: dict[str, State] = {}
        for name, shape in self._shards.shapes.items():
            for part in self._shards.parts[name]:
                for key, value in by_slot[part.server].get(part.slot, {}).items():
                    state = found.setdefault(name, {})
                    if self._shards.whole or not isinstance(value, torch.Tensor) or value.dim() == 0:
                        state[key] = value  # one for the whole tensor
                    else:
                        whole = state.setdefault(key, torch.empty(shape, dtype=value.dtype))
                        whole.view(-1)[part.start : part.stop] = value
        return found

    def _state_of(self, server: Connection, copy: Copied) -> dict[int, State]:
        states: dict[int, State] = {}
        for flat_name, value in _entries(server, self._of(copy, "state")).items():
            slot, _, key = flat_name.partition("/")
            states.setdefault(int(slot), {})[key] = value
        return states

    def table(self, copy: Copied, table: int) -> tuple[torch.Tensor, State]:
        """Return a table and its optimizer state, of a frozen copy."""
        spec = self._tables[table]
        found: State = {}
        for number, server in enumerate(self._servers):
            for key, value in _entries(server, self._of(copy, "table", table)).items():
                if isinstance(value, torch.Tensor):
                    whole = found.setdefault(key, torch.empty(spec.rows, spec.width))
                    whole[number :: len(self._servers)] = value
                else:
                    found[key] = value
        weight = found.pop("")
        steps = found.pop("steps", 0.0)
        if found or steps:
            found["step"] = torch.tensor(float(steps))
        return weight, found

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the summed gradients of the last step, of those parameters that have one (while recording)."""
        gradients, told = self._read(requests.ReadFrozen(container=self._container, what="sums"))
        touched = [{int(slot) for slot, _, _ in reply.entries} for reply in told]
        return {
            name: gradient
            for name, gradient in gradients.items()
            if any(part.slot in touched[part.server] for part in self._shards.parts[name])
        }

    def table_gradient(self, table: int) -> torch.Tensor:
        """Return the summed gradient of the last step, as a whole table."""
        spec, servers = self._tables[table], len(self._servers)
        whole = torch.zeros(spec.rows, spec.width)
        for number, server in enumerate(self._servers):
            found = _entries(server, requests.ReadFrozen(container=self._container, what="rows", table=table))
            whole[found["ids"] * servers + number] = found["values"]
        return whole

    def _of(self, copy: Copied, what: requests.What, table: int = 0) -> requests.ReadFrozen:
        return requests.ReadFrozen(container=self._container, number=copy.number, what=what, table=table)

    def _read(self, request: requests.ReadFrozen) -> tuple[dict[str, torch.Tensor], list[replies.Tensors]]:
        flats: list[torch.Tensor] = []
        told: list[replies.Tensors] = []
        for server, layout in zip(self._servers, self._shards.layouts, strict=True):
            flat = torch.empty(layout.bytes, dtype=torch.uint8)
            told.append(server.call(request, replies.Tensors, read=into(flat)))
            flats.append(flat)
        return self._whole(flats), told

    def _whole(self, flats: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of which each server has a share in its flat buffer."""
        found = {}
        for tensor in self._shards.spec.tensors:
            whole = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
            for part in self._shards.parts[tensor.name]:
                values = slot_of(flats[part.server], self._shards.layouts[part.server], part.slot)
                whole.view(-1)[part.start : part.stop] = values
            found[tensor.name] = whole
        return found

    # ── giving ───────────────────────────────────────────────────────────────────────────────────────────

    def flat(self, number: int, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a server's flat buffer with these values."""
        layout = self._shards.layouts[number]
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
        for number, server in enumerate(self._servers):
            entries: list[tuple[int, str, str, tuple[int, ...]]] = []
            numbers: list[tuple[int, str, float]] = []
            born: list[int] = []
            body = [bytes_of(self.flat(number, parameters))]
            for name in self._shards.names:
                elements = parameters[name].numel()
                for part in (part for part in self._shards.parts[name] if part.server == number):
                    for key, value in states.get(name, {}).items():
                        if not isinstance(value, torch.Tensor):
                            numbers.append((part.slot, key, float(value)))
                            continue
                        own = value.detach()
                        if own.numel() == elements > 1:
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
            server.call(request, replies.Done, body=lambda body=body: body)  # type: ignore[misc]

    def give_table(self, table: int, weight: torch.Tensor, state: State) -> None:
        """Give the servers a whole table and its optimizer state, as `table` returns them."""
        self.put_rows(table, "", weight, int(state.get("step", 0)))
        for key, value in state.items():
            if key != "step":
                self.put_rows(table, key, value)

    def put_rows(self, table: int, key: str, values: torch.Tensor, steps: int | None = None) -> None:
        """Give the servers a value for every row: of the weight (no key), or of the optimizer's state."""
        for number, server in enumerate(self._servers):
            own = values[number :: len(self._servers)]
            for start in range(0, len(own), ROWS_AT_ONCE):
                part = own[start : start + ROWS_AT_ONCE].contiguous()
                request = requests.PutRows(
                    container=self._container, table=table, start=start, rows=len(part), key=key, steps=steps
                )
                server.call(request, replies.Done, body=lambda part=part: [bytes_of(part)])  # type: ignore[misc]


def _entries(server: Connection, request: requests.ReadFrozen) -> dict[str, Any]:
    """Return named tensors and numbers of a copy."""
    body = bytearray()

    def read(channel: Channel[replies.Reply], length: int) -> None:
        body[:] = channel.read_whole_body(length)

    reply: replies.Tensors = server.call(request, replies.Tensors, read=read)
    return {**named_tensors(reply.entries, body), **dict(reply.numbers)}
