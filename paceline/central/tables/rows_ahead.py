"""Rows of tables that are asked for before the model runs.

    sync     … report ──▶ settled ──┬─▶ pull ──▶ user ──▶ ask ──▶ ticket ──▶ forward: the rows are there
                                    └─▶ rows of the next batch, on a connection of their own
    async    ask ──▶ ticket ──┬─▶ pull ──▶ forward
                              └─▶ rows of this batch

In a sync run a replica knows its part of the next batch, which is loaded while it computes. Its rows are asked for as
soon as the step is closed and not before: so they have the step's changes, whoever made them, and nobody can change
them until this replica has reported again. In an async run they are asked for together with the parameters, since rows
that are older would be staler.

What will be looked up is a guess (`inputs`). An answer is used if it is for exactly the rows that a table is called
with, and of no older a version than the parameters; else they are pulled when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from paceline.central.jobs import BackgroundJob, together
from paceline.central.tables.embedding import Found, Lookup
from paceline.central.tables.inputs import Inputs, tensors_of
from paceline.central.tables.tables import Dealt
from paceline.errors import PacelineError, Stalled

# server, table, rows as numbered there, memory for their values, steps that must have been made -> those that were
PullRows = Callable[[int, int, torch.Tensor, torch.Tensor, int], int]


@dataclass(eq=False)
class _Expected:
    """One call of a table that is to be answered."""

    lookup: Lookup
    input: torch.Tensor
    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    places: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    parts: list[torch.Tensor] = field(default_factory=list)  # values by server
    dealt: Dealt = field(default_factory=Dealt)
    versions: list[int] = field(default_factory=list)

    def prepare(self, servers: int) -> None:
        self.rows, self.places = self.lookup.rows_of(self.input)
        self.dealt = Dealt.out(self.rows, servers)
        self.parts = [torch.empty(len(ids), self.lookup.width) for ids in self.dealt.ids]

    def is_for(self, input: torch.Tensor) -> bool:
        mine = self.input
        return mine.dtype == input.dtype and mine.shape == input.shape and torch.equal(mine, input)

    def found(self) -> Found:
        if len(self.parts) == 1:
            return Found(self.rows, self.places, self.parts[0])
        values = torch.empty(len(self.rows), self.lookup.width)
        for part, places in zip(self.parts, self.dealt.places, strict=True):
            values.index_copy_(0, places, part)
        return Found(self.rows, self.places, values)


class RowsAhead:
    """Asks ahead for one replica, for all of its tables."""

    def __init__(self, tables: Sequence[Lookup], servers: int, pull: PullRows) -> None:
        self._tables = tables
        self._servers = servers
        self._pull = pull
        self._inputs = [Inputs() for _ in tables]
        self._expected: list[_Expected] = []
        self._job: BackgroundJob | None = None
        self.used = 0  # calls of tables that were answered ahead

    def begin_pass(self, batch: Any) -> None:
        """The model is called with this batch now."""
        leaves = tensors_of(batch)
        for inputs in self._inputs:
            inputs.begin_pass(leaves)

    def expect(self, batches: Iterable[Any], step: int) -> None:
        """These will be computed next, on the parameters after at least that many steps."""
        leaves = [tensors_of(batch) for batch in batches]
        wanted = [
            (lookup, input)
            for lookup, inputs in zip(self._tables, self._inputs, strict=True)
            for of_batch in leaves
            for input in inputs.expected(of_batch)
        ]
        if self._has_all(wanted):
            return
        self.forget()
        self._expected = [_Expected(lookup, input) for lookup, input in wanted]
        if self._expected:
            self._job = BackgroundJob(partial(self._fetch, list(self._expected), step))

    def _has_all(self, wanted: Sequence[tuple[Lookup, torch.Tensor]]) -> bool:
        return len(wanted) == len(self._expected) and all(
            there.lookup is lookup and there.is_for(input)
            for there, (lookup, input) in zip(self._expected, wanted, strict=True)
        )

    def _fetch(self, expected: Sequence[_Expected], step: int) -> None:
        """In a thread of its own."""
        for each in expected:
            each.prepare(self._servers)
        versions = [[0] * self._servers for _ in expected]

        def fetch_from(server: int) -> None:
            for each, own in zip(expected, versions, strict=True):
                ids, part = each.dealt.ids[server], each.parts[server]
                own[server] = self._pull(server, each.lookup.number, ids, part, step) if len(ids) else step

        together([partial(fetch_from, server) for server in range(self._servers)])
        for each, own in zip(expected, versions, strict=True):
            each.versions = own

    def take(self, table: int, input: torch.Tensor) -> tuple[Found, int] | None:
        """Return what was asked for ahead for this call of a table, and after how many steps it was so."""
        self._inputs[table].called(input)
        of_table = [each for each in self._expected if each.lookup.number == table]
        if not of_table:
            return None
        answer = next((each for each in of_table if each.is_for(input)), None)
        self._inputs[table].judge(right=answer is not None)
        if answer is None or not self._has_arrived():
            return None
        self._expected.remove(answer)
        self.used += 1
        return answer.found(), min(answer.versions)

    def _has_arrived(self) -> bool:
        """Waits for what is under way."""
        job, self._job = self._job, None
        try:
            if job is not None:
                job.result()
        except Stalled:
            raise
        except PacelineError:
            self._expected = []  # what is wrong is said when it is asked for again
            return False
        return True

    def forget(self) -> None:
        """Nothing that was asked for is of use any more."""
        if self._job is not None:
            self._has_arrived()
        self._expected = []
