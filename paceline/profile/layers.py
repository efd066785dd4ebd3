"""What each layer costs, and when its gradients are there: a step with hooks on modules and parameters.

Forward is timed around every module that has no modules inside. Backward tells when a gradient is complete; what passed
since the one before it is that layer's. So a layer without parameters counts, backward, with the one that comes next.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.loss_value import Weight
from paceline.optim.direct_gradients import as_in_a_step
from paceline.optim.models import left_as_it_was, own_state
from paceline.profile.step_times import StepWork
from paceline.profile.values import LayerTime
from paceline.torch_private import tree_leaves

ROUNDS = 3
_POINTS = 64  # of the curve of arrivals


@dataclass
class LayerLook:
    """What one look at a step has found."""

    layers: tuple[LayerTime, ...]
    forward_share: float
    arrivals: tuple[tuple[float, float], ...]
    zero_share: float
    sparse_bytes: int
    sparse_table_bytes: int


class _Watch:
    """The hooks of one step."""

    def __init__(self, model: nn.Module) -> None:
        self.began: dict[str, float] = {}
        self.forward: dict[str, float] = {}
        self.bytes: dict[str, int] = {}
        self.landed: list[tuple[float, torch.Tensor]] = []
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            if not any(True for _ in module.children()):
                self._handles.append(module.register_forward_pre_hook(self._enter(name)))
                self._handles.append(module.register_forward_hook(self._leave(name)))
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._land))  # type: ignore[no-untyped-call]

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, given: Any) -> None:
            self.began[name] = time.perf_counter()

        return enter

    def _leave(self, name: str) -> Any:
        def leave(module: nn.Module, given: Any, result: Any) -> None:
            self.forward[name] = self.forward.get(name, 0.0) + time.perf_counter() - self.began[name]
            sizes = (leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
            self.bytes[name] = self.bytes.get(name, 0) + sum(sizes)

        return leave

    def _land(self, parameter: torch.Tensor) -> None:
        self.landed.append((time.perf_counter(), parameter))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def layer_times(work: StepWork) -> LayerLook:
    """Returns what the fastest of a few steps shows."""
    model = own_state(work.model)
    best: tuple[float, float, float, _Watch] | None = None
    with left_as_it_was(work.model), as_in_a_step():
        for _ in range(ROUNDS):
            watch = _Watch(model)
            began = time.perf_counter()
            found = work.check(work.loss(work.model, work.batch))
            between = time.perf_counter()
            found.backward(Weight.whole(work.samples))
            ended = time.perf_counter()
            watch.close()
            if best is None or ended - began < best[2] - best[0]:
                best = (began, between, ended, watch)
            gradients = [parameter for _, parameter in watch.landed]
            sparsity = _sparsity(gradients)
            for parameter in model.parameters():
                parameter.grad = None
            if ended - began > 1.0:
                break
    assert best is not None
    began, between, ended, watch = best
    forward_share = (between - began) / (ended - began)
    arrivals = _arrivals(watch.landed, between, ended)
    return LayerLook(_layers(model, watch, between), forward_share, arrivals, *sparsity)


def _layers(model: nn.Module, watch: _Watch, between: float) -> tuple[LayerTime, ...]:
    owner = {id(p): name for name, module in model.named_modules() for p in module.parameters(recurse=False)}
    backward: dict[str, float] = {}
    before = between
    for at, parameter in watch.landed:
        name = owner.get(id(parameter), "")
        backward[name] = backward.get(name, 0.0) + at - before
        before = at
    modules = dict(model.named_modules())
    return tuple(
        LayerTime(
            name=name,
            kind=type(modules[name]).__name__,
            parameters=sum(p.numel() for p in modules[name].parameters(recurse=False)),
            activation_bytes=watch.bytes.get(name, 0),
            forward_s=watch.forward.get(name, 0.0),
            backward_s=backward.get(name, 0.0),
        )
        for name in dict.fromkeys([*watch.forward, *backward])
    )


def _arrivals(
    landed: Sequence[tuple[float, torch.Tensor]], between: float, ended: float
) -> tuple[tuple[float, float], ...]:
    """Returns the share of gradient bytes that are there at some shares of the time of backward."""
    lasted = max(ended - between, 1e-9)
    total = sum(parameter.nbytes for _, parameter in landed) or 1
    points: list[tuple[float, float]] = []
    there = 0
    for at, parameter in landed:
        there += parameter.nbytes
        points.append((round(min(1.0, (at - between) / lasted), 4), round(there / total, 5)))
    if len(points) > _POINTS:
        every = len(points) / _POINTS
        points = [*(points[int(number * every)] for number in range(_POINTS)), points[-1]]
    return tuple(points)


def _sparsity(parameters: Sequence[torch.Tensor]) -> tuple[float, int, int]:
    """Returns the share of dense gradients that is zero; bytes of rows, and of tables, whose gradients are sparse."""
    zeros = elements = rows = tables = 0
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            once = gradient.coalesce()  # a row counts once, as it is sent
            rows += once.values().nbytes + once.indices().nbytes
            tables += parameter.nbytes
        else:
            zeros += int((gradient == 0).sum())
            elements += gradient.numel()
    return zeros / max(1, elements), rows, tables
