"""One process: plain torch, nothing shared. What every other engine's results are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.deadlines import call_limit
from paceline.errors import ModelError
from paceline.loop.engine import Batch, Closed, Computed
from paceline.loop.lockstep import BatchShare, LockstepEngine
from paceline.loop.passes import PlainWorker
from paceline.loop.run_state import RunState, StateByName
from paceline.loss_value import LossPart, nothing_counted
from paceline.optim.models import own_state, parameter_names
from paceline.split.cut import Function
from paceline.stoppable_calls import CallGivenUp, check_in_time, in_time


class Solo(LockstepEngine):
    """The engine of a process that is alone."""

    in_charge = True

    def __init__(self, model: nn.Module, optimizer: Optimizer, clip_norm: float | None) -> None:
        self.model = model
        self._worker = PlainWorker(model)
        self._optimizer = optimizer
        self._clip_norm = clip_norm

    def step(self, batches: Sequence[Batch]) -> Closed:
        (batch,) = batches
        self._optimizer.zero_grad(set_to_none=True)
        computed = self._compute(batch)
        part, samples = computed.loss, computed.samples
        assert part.loss is not None
        if part.counted:
            self._divide(part, batch.work.step)
        if self.gradients_ready is not None:
            self.gradients_ready()
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._trained(), self._clip_norm)
        self._optimizer.step()
        return Closed(part.loss.mean, samples, 1, logged=part.means)

    def _compute(self, batch: Batch) -> Computed:
        """Gradients, in the time there is for them: after that nothing is given up any more."""
        limit = call_limit()
        before = [(buffer, buffer.clone()) for buffer in self.model.buffers()] if limit is not None else []
        try:
            with in_time(self.model, limit):
                computed = batch.compute(self._worker, BatchShare(0, 1))
            check_in_time(limit)
        except CallGivenUp:
            assert limit is not None
            self._optimizer.zero_grad(set_to_none=True)
            for buffer, value in before:
                buffer.copy_(value)
            raise limit.exceeded("the step") from None
        return computed

    def _divide(self, part: LossPart, step: int) -> None:
        """Makes the gradients of sums, which are over their unit, those of the mean."""
        assert part.loss is not None
        if not part.loss.count:
            raise nothing_counted(step)
        weight = part.weight(part.loss.count)
        for parameter in self._trained() if weight != 1.0 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(weight)

    def compute(self, function: Function, given: Any) -> Any:
        return function(self.model, given)

    def once(self, number: int, act: Callable[[], None]) -> None:
        act()

    def gradients(self) -> dict[str, torch.Tensor]:
        names = parameter_names(self.model)
        found = {names[p]: p.grad for p in self._trained() if p.grad is not None}
        return {name: grad.to_dense() if grad.is_sparse else grad.clone() for name, grad in found.items()}

    def _trained(self) -> list[nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def optimizer_state(self) -> StateByName:
        names = parameter_names(self.model)
        if strangers := [p for p in self._optimizer.state if p not in names]:
            shape = tuple(strangers[0].shape)
            raise ModelError("optimizer", f"a parameter of shape {shape}", "it is none of the model's, put it there")
        return {
            names[p]: {key: value for key, value in state.items() if value is not None}
            for p, state in self._optimizer.state.items()
            if state
        }

    def model_state(self) -> dict[str, torch.Tensor]:
        return own_state(self.model).state_dict()

    def take_state(self, model: dict[str, torch.Tensor], optimizer: StateByName, state: RunState) -> None:
        own_state(self.model).load_state_dict(model)
        by_name = {name: p for p, name in parameter_names(self.model).items()}
        self._optimizer.state.clear()
        for name, held in optimizer.items():
            parameter = by_name[name]
            self._optimizer.state[parameter] = {
                key: _beside(parameter, key, value, self._group_of(parameter)) for key, value in held.items()
            }

    def _group_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        groups = self._optimizer.param_groups
        return next((group for group in groups if any(own is parameter for own in group["params"])), {})

    def close(self) -> None:
        """Nothing is shared."""


def _beside(parameter: torch.Tensor, key: str, value: Any, group: dict[str, Any]) -> Any:
    """Returns what an optimizer keeps of a parameter, on its device. How often it was updated torch counts on the host,
    unless the group says otherwise."""
    if not isinstance(value, torch.Tensor):
        return value
    on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
    return value if on_host else value.to(parameter.device)
