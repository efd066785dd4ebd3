"""Rows of tables on their way between a replica and the servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.central.client.pulling import Pulls
from paceline.central.client.server_view import ServerView, into
from paceline.central.messages import replies, requests
from paceline.central.messages.connection import Connection
from paceline.central.messages.tensor_bytes import bytes_of
from paceline.central.tables.embedding import Found, Lookup
from paceline.central.tables.rows_ahead import RowsAhead
from paceline.central.tables.tables import Dealt, Rows, table_view
from paceline.memory.arena import Arena


class TableRows:
    """Looks up rows for one replica's model, and collects their gradients."""

    def __init__(self, tables: Sequence[Lookup], views: Sequence[ServerView], pulls: Pulls, container: str) -> None:
        self._tables = tables
        self._views = views
        self._pulls = pulls
        self._container = container
        self._is_computing = False
        self._connections: Sequence[Connection] = ()  # for what is asked for ahead
        self.ahead: RowsAhead | None = None  # only where rows have to travel

    def attach(self, number: int) -> None:
        """See a server's rows in its own memory, if that can be shared."""
        view = self._views[number]
        assert view.opened is not None
        view.tables = [
            table_view(Arena.attach(*held), len(range(number, lookup.rows, len(self._views))), lookup.width)
            for lookup, held in zip(self._tables, view.opened.tables, strict=False)
        ]

    def connect(self, connections: Sequence[Connection]) -> None:
        """From now on the values are on the servers."""
        for lookup in self._tables:
            lookup.connect(self._find)
        if self._tables and not any(view.tables for view in self._views):
            self._connections = connections
            self.ahead = RowsAhead(self._tables, len(self._views), self._pull_ahead)

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────

    def expect(self, batches: Sequence[Any], step: int) -> None:
        """What will be computed next, after at least so many steps: rows that it needs are asked for."""
        if self.ahead is not None:
            self.ahead.expect(batches, step)

    def begin(self) -> None:
        """What is looked up from now on is part of a step."""
        self._is_computing = True
        for lookup in self._tables:
            lookup.forget()

    def begin_pass(self, batch: Any) -> None:
        """Forward and backward of this batch follow."""
        if self.ahead is not None:
            self.ahead.begin_pass(batch)

    def end(self) -> None:
        """The step has been computed, or will not be."""
        self._is_computing = False
        if self.ahead is not None:
            self.ahead.forget()  # whatever was not used is of a version that has passed

    def take_gradients(self) -> list[list[Rows]]:
        """Return the gradients of this step's rows, by server and table."""
        found: list[list[Rows]] = [[] for _ in self._views]
        for lookup in self._tables:
            rows = lookup.take_gradient()
            dealt = Dealt.out(rows.ids, len(self._views))
            for own, ids, places in zip(found, dealt.ids, dealt.places, strict=True):
                own.append(Rows(ids, rows.values[places]))
        return found

    # ── looking up ───────────────────────────────────────────────────────────────────────────────────────

    def _find(self, table: int, input: torch.Tensor) -> Found:
        """Return what a call of a table looks up."""
        if self.ahead is not None and self._is_computing and torch.is_grad_enabled():
            answer = self.ahead.take(table, input)
            if answer is not None and self._is_new_enough(answer[1]):
                return answer[0]
        rows, places = self._tables[table].rows_of(input)
        return Found(rows, places, self._fetch(table, rows))

    def _is_new_enough(self, version: int) -> bool:
        """Return whether rows of that version may be used. In an async run all may, and are as stale as they are."""
        if not self._pulls.sync:
            self._pulls.uses_older(version)
        return version >= self._pulls.version

    def _fetch(self, table: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the values of some rows: from the servers' memory, or over TCP."""
        if len(self._views) == 1 and self._views[0].tables:
            return self._views[0].tables[table].index_select(0, rows)
        dealt = Dealt.out(rows, len(self._views))
        values = torch.empty(len(rows), self._tables[table].width)
        for view, ids, places in zip(self._views, dealt.ids, dealt.places, strict=True):
            if view.tables:
                values.index_copy_(0, places, view.tables[table].index_select(0, ids))
            elif len(ids):
                received = torch.empty(len(ids), self._tables[table].width)
                self._pull(view.connection, table, ids, received, max(0, self._pulls.version))
                values[places] = received
        return values

    def _pull_ahead(self, server: int, table: int, ids: torch.Tensor, received: torch.Tensor, at_least: int) -> int:
        return self._pull(self._connections[server], table, ids, received, at_least)

    def _pull(
        self, connection: Connection, table: int, ids: torch.Tensor, received: torch.Tensor, at_least: int
    ) -> int:
        request = requests.PullRows(container=self._container, table=table, at_least=at_least)
        return int(connection.wait(request, replies.Pulled, body=lambda: [bytes_of(ids)], read=into(received)).step)

    # ── ending ───────────────────────────────────────────────────────────────────────────────────────────

    def give_up(self) -> None:
        """Have whoever waits for a server fail. From any thread."""
        for connection in self._connections:
            connection.give_up()

    def close(self) -> None:
        for lookup in self._tables:
            lookup.close()
        for connection in self._connections:
            connection.close()
