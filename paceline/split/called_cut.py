"""A cut of a model that is only called, not trained: for requests, and for what comes before the first batch of a run.

The first call decides who does what. Parts of parameters and buffers are views of the model's own, so what is loaded
into it later is what is computed with.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from paceline.errors import InvalidInput
from paceline.optim.models import own_state
from paceline.split.cut import Cut, Function


class CalledCut:
    """One device's side of a model that all devices of a replica call together."""

    def __init__(self, cut: Cut, model: nn.Module) -> None:
        self._cut, self._model = cut, model

    def prepare(self, function: Function, given: Any) -> None:
        """Cuts the model for calls like this one, of which nothing is computed yet."""
        self._cut.prepare(function, self._model, given)
        inner = own_state(self._model)
        named = [*inner.named_parameters(), *inner.named_buffers()]
        self._cut.take({name: self._cut.part_of(name).of(tensor.detach()) for name, tensor in named})

    def call(self, function: Function, given: Any) -> Any:
        """Returns `function(model, given)`, on every device."""
        return self._cut.call(function, self._model, given)

    def release(self) -> None:
        """Leaves the model as it came."""
        self._cut.release()


class EarlyCalls:
    """What a model that will be cut for training computes before that: evaluations and requests, in eval mode.

    How to cut it for training follows from the loss on the first batch, which is not there yet. So these calls have a
    cut of their own until then. Where they cannot be cut, each device computes them with the whole model; what is wrong
    with the cut that was asked for is said when training begins.
    """

    def __init__(self, training: Cut, model: nn.Module) -> None:
        """`training`: the cut that nothing is decided of yet."""
        self._training, self._model = training, model
        self._tried = not training.quickens_calls
        self._cut: CalledCut | None = None

    def call(self, function: Function, given: Any) -> Any:
        """Returns `function(model, given)`, on every device of the replica, which all ask for it together."""
        if not self._tried:
            self._tried = True
            self._cut = self._opened(function, given)
        return function(self._model, given) if self._cut is None else self._cut.call(function, given)

    def _opened(self, function: Function, given: Any) -> CalledCut | None:
        cut = CalledCut(self._training.another(), self._model)
        try:
            with self._training.peers.each_replica_by_itself():  # others may have nothing to compute
                cut.prepare(function, given)
        except InvalidInput:
            cut.release()
            return None
        return cut

    def end(self) -> None:
        """Training begins, with its own cut."""
        if self._cut is not None:
            self._cut.release()
        self._tried, self._cut = True, None
