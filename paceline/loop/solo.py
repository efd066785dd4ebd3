"""One process: plain torch, nothing shared. What every other engine's results are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.loop.engine import Closed, Computed, Share, StateByName
from paceline.optim.models import own_state, parameter_names
from paceline.split.cut import Cut, Example


class Solo:
    """The engine of a process that is alone."""

    chief = True
    cut: Cut | None = None

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self.joining = False
        self.notes_for_joining: Callable[[], dict[str, Any]] = dict
        self.gradients_ready: Callable[[], None] | None = None

    def share(self) -> Share:
        return Share(0, 1)

    def expect(self, steps: int) -> None:
        pass

    def prepare(self, example: Example) -> None:
        raise AssertionError("a process that is alone has all of the model")

    def join(self) -> dict[str, Any]:
        raise AssertionError("a process that is alone has nobody to join")

    def one_pass(self, *, is_last: bool, among: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self, number: int, compute: Callable[[Share], Computed], clip_norm: float | None) -> Closed:
        self._optimizer.zero_grad(set_to_none=True)
        computed = compute(Share(0, 1))
        if self.gradients_ready is not None:
            self.gradients_ready()
        if clip_norm is not None:
            trained = [p for group in self._optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(trained, clip_norm)
        self._optimizer.step()
        return Closed(computed.loss, computed.samples, 1)

    def total(self, compute: Callable[[Share], torch.Tensor]) -> torch.Tensor:
        return compute(Share(0, 1))

    def once(self, act: Callable[[], None]) -> None:
        act()

    def gradients(self) -> dict[str, torch.Tensor]:
        """The step's gradients by parameter name, while the step is open."""
        names = parameter_names(self._model)
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        found = {names[p]: p.grad for p in trained if p.grad is not None}
        return {name: grad.to_dense() if grad.is_sparse else grad.clone() for name, grad in found.items()}

    def optimizer_state(self) -> StateByName:
        names = parameter_names(self._model)
        return {
            names[p]: {key: value for key, value in state.items() if value is not None}
            for p, state in self._optimizer.state.items()
            if state
        }

    def model_state(self) -> dict[str, torch.Tensor]:
        return own_state(self._model).state_dict()

    def take_state(self, model: dict[str, torch.Tensor], optimizer: StateByName) -> None:
        own_state(self._model).load_state_dict(model)
        by_name = {name: p for p, name in parameter_names(self._model).items()}
        self._optimizer.state.clear()
        for name, state in optimizer.items():
            self._optimizer.state[by_name[name]] = dict(state)

    def close(self) -> None:
        pass
