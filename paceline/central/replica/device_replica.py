"""A replica on an accelerator, with parameters on servers.

Its client knows the model's copy in the host's memory, and pulls into that; what was pulled is copied to the device
before a ticket is computed. Gradients go from the device to where the servers see them, or to where they are sent from,
as backward makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.central.client.client import Client
from paceline.central.messages.replies import Ticket
from paceline.central.replica.engine import CentralizedEngine
from paceline.loop.engine import Batch, Closed, Computed
from paceline.loop.run_state import RunState, StateByName
from paceline.optim.host_copy import HostCopy
from paceline.run_place import Place
from paceline.split.cut import Function
from paceline.strategy import Centralized


class DeviceEngine(CentralizedEngine):
    """One replica among several, whose model is not on the host."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, place: Place, strategy: Centralized, clip_norm: float | None
    ) -> None:
        self._copy = HostCopy(model, optimizer)
        super().__init__(self._copy.model, self._copy.optimizer, place, strategy, clip_norm)
        self.client.options_from = optimizer  # which schedulers change
        self._worker.model = model
        self._version = -1  # of the parameters that the device has

    def _own_client(self, model: nn.Module, optimizer: Optimizer, replica: int) -> Client:
        return self._open(model, optimizer, replica=replica, computed_with=self._copy.on_device)

    def _to_device(self) -> None:
        pulled = self.client.pulled
        self._copy.to_device(parameters=pulled == -1 or pulled != self._version)
        self._version = pulled

    def compute(self, function: Function, given: Any) -> Any:
        return function(self._copy.on_device, given)

    def refresh(self) -> None:
        super().refresh()
        self._to_device()

    def step(self, batches: Sequence[Batch]) -> Closed:
        closed = super().step(batches)
        self._to_device()  # what the script looks at is what the servers have
        return closed

    def _compute(self, batch: Batch, ticket: Ticket) -> Computed:
        self._to_device()
        computed = super()._compute(batch, ticket)
        self._copy.buffers_back()
        return computed

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        try:
            with super().whole_model():
                self._copy.to_device()
                yield self._copy.on_device
        finally:
            self._copy.to_device()

    def take_state(self, model: dict[str, torch.Tensor], optimizer: StateByName, state: RunState) -> None:
        super().take_state(model, optimizer, state)
        self._copy.to_device()
