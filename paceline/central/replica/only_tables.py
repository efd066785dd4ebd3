"""Mirrored replicas whose tables are on servers: `--servers 2 --only sparse`.

Dense parts are shared by all replicas of the host, sparse ones are looked up and updated by row.

The step belongs to the mirrored replicas. Before a replica arrives, the rows it has gradients for are on the servers;
once all have arrived the step is decided, and every replica tells the servers to make it. The first is obeyed and the
others find it made, so whoever dies in between, the rows are updated exactly once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.central.chief.tickets import Accepted, Close
from paceline.central.client.client import Client
from paceline.central.messages.settings import Settings
from paceline.central.replica.engine import servers_of
from paceline.errors import ModelError
from paceline.exchange.members import Members
from paceline.mirrored.step_parts import DecidedStep, StepPart
from paceline.run_place import Place


class TablesOnServers(StepPart):
    """The tables of a mirrored replica."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, place: Place, number: int, incarnation: int) -> None:
        """`number`: of this trainer in the script."""
        assert place.servers is not None
        self._client = Client(
            model,
            optimizer,
            servers_of(place, number),
            Settings(replicas=place.world, timeout_s=place.strategy.timeout_s),
            replica=place.rank,
            incarnation=incarnation,
            only_tables=True,
        )
        if not self._client.tables:
            raise ModelError("model", "without tables", "--only sparse needs an nn.Embedding(sparse=True)")
        self._ahead: int | None = None  # the run's steps that the tables have not seen, because they came later

    def begin(self, members: Members, number: int) -> None:
        self._client.begin()

    def computed(self, members: Members, number: int) -> None:
        if self._ahead is None:
            self._ahead = number - self._client.steps_made()
        self._client.push(number, [])

    def squared_norm(self, step: DecidedStep) -> float:
        return self._client.measure(self._close(step))

    def update(self, step: DecidedStep, scale: float) -> None:
        self._client.make(self._close(step), scale)

    def _close(self, step: DecidedStep) -> Close:
        assert self._ahead is not None
        # The gradients of each replica's share of a mean over samples are added as they are.
        weights = step.weights or dict.fromkeys(step.members.ranks, 1.0)
        accepted = [Accepted(step.number, rank, weights[rank], 1, 0, 0, []) for rank in step.members.ranks]
        return Close(step.number - self._ahead, 0, len(accepted), 0.0, accepted)

    # ── whole tables ─────────────────────────────────────────────────────────────────────────────────────

    def names(self) -> set[str]:
        return {lookup.name for lookup in self._client.tables}

    def read(self) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
        """Every table, and its optimizer state, while no step is being made."""
        copy = self._client.whole.freeze()
        weights, states = {}, {}
        for lookup in self._client.tables:
            weights[lookup.name], state = self._client.whole.table(copy, lookup.number)
            if state:
                states[lookup.name] = state
        self._client.whole.thaw(copy)
        return weights, states

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of the last step, as whole tables."""
        return {lookup.name: self._client.whole.table_gradient(lookup.number) for lookup in self._client.tables}

    def put(self, weights: dict[str, torch.Tensor], states: dict[str, dict[str, Any]]) -> None:
        for lookup in self._client.tables:
            self._client.whole.give_table(lookup.number, weights[lookup.name], states.get(lookup.name, {}))

    def close(self) -> None:
        self._client.close()
