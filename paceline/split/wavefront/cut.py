"""Which of the two ways to make waves a model is for: modules of several recurrent layers, or cells in a loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.errors import StrategyError
from paceline.exchange.mailboxes import Peers
from paceline.loss_value import LossPart, Weight
from paceline.optim.models import own_state
from paceline.split.cut import Check, Cut, Function, Loss, TensorPart
from paceline.split.values import Wavefront
from paceline.split.wavefront.cells_cut import CellsCut
from paceline.split.wavefront.stacked_modules import (
    StackedModulesCut,
    recurrent_modules,
    refuse_bidirectional,
    stacked_modules,
)


class WavefrontCut(Cut):
    """One device's layers, found when the model is prepared."""

    def __init__(self, split: Wavefront, peers: Peers) -> None:
        super().__init__(peers)
        self._split = split
        self._way: Cut

    @property
    def speaks(self) -> bool:
        return self.peers.rank == self.peers.count - 1

    def prepare(self, function: Function, model: nn.Module, given: Any) -> None:
        inner = own_state(model)
        if stacked_modules(inner):
            self._way = StackedModulesCut(self._split, self.peers)
            self._way.prepare(function, model, given)
            return
        no_module = "the model has no nn.LSTM, nn.GRU or nn.RNN of several layers (num_layers=2 or more)"
        if single := next(iter(recurrent_modules(inner)), None):
            no_module += f", {single!r} has one"
        self._way = CellsCut(self._split, self.peers, no_module)
        try:
            self._way.prepare(function, model, given)
        except StrategyError:
            refuse_bidirectional(inner)  # which is what its author should hear of
            raise

    def part_of(self, name: str) -> TensorPart:
        return self._way.part_of(name)

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        self._way.take(tensors)

    def train(self, loss: Loss, model: nn.Module, batch: Any, weight: Weight, check: Check) -> LossPart:
        return self._way.train(loss, model, batch, weight, check)

    def call(self, function: Function, model: nn.Module, given: Any) -> Any:
        return self._way.call(function, model, given)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with self._way.at_work():
            yield
