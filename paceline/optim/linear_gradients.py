"""Linear layers whose weight's gradient is written once: where it goes.

Backward makes a gradient in memory of its own, and a hook copies it into the arena. The gradient of a linear layer's
weight is the product of two small matrices, and as large as the weight: to write it there at once saves reading and
writing all of it. While a step is computed, `F.linear` is therefore one that knows where its weight's gradient goes.

It stands back for whoever wants to see that gradient on its way, or has other plans with it: hooks, autocast, the
compiler, `torch.func`, a gradient that is itself differentiated, `torch.autograd.grad`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.overrides import _get_current_function_mode_stack
from torch.utils.weak import WeakTensorKeyDictionary

LEAST_ELEMENTS = 1 << 18  # a megabyte: of a smaller gradient the copy takes less time than an operator in Python

_plain_linear: Callable[..., torch.Tensor] = F.linear  # torch's, or whatever stood there when the step began
_places: Any = WeakTensorKeyDictionary()  # of weights that are being trained
_computing: set[Collector] = set()
_lock = threading.Lock()


class Collector(Protocol):
    """Collects the gradients of a step, each in its slot."""

    def multiply(self, slot: int, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Have a gradient that is this product where it goes; False if none is collected now."""


@dataclass(frozen=True)
class GradientPlace:
    """Where the gradient of one weight goes."""

    collector: Collector
    slot: int


def lead(weight: torch.nn.Parameter, collector: Collector, slot: int) -> bool:
    """The gradient of `weight` may be computed where `collector` has it; False if that would not pay."""
    pays = (
        type(weight) is torch.nn.Parameter
        and weight.dim() == 2
        and weight.numel() >= LEAST_ELEMENTS
        and weight.is_floating_point()
        and weight.device.type == "cpu"
    )
    if pays:
        _places[weight] = GradientPlace(collector, slot)
    return pays


def forget(weight: torch.nn.Parameter) -> None:
    _places.pop(weight, None)


def place_of(weight: torch.Tensor) -> GradientPlace | None:
    """Where the gradient of `weight` may be computed; None if somebody wants to see it on its way."""
    place: GradientPlace | None = _places.get(weight)
    if (
        place is None
        or weight._backward_hooks
        or len(weight._post_accumulate_grad_hooks or ()) > 1  # one is the collector's
        or not torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _somebody_changes_operators()
    ):
        return None
    return place


def _somebody_changes_operators() -> bool:
    """Whether there is a `TorchFunctionMode` that is neither ours nor torch's own."""
    modes = _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()  # type: ignore[no-untyped-call]
    return not all(type(mode).__module__.startswith(("paceline.", "torch.")) for mode in modes)


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    usual = not torch.compiler.is_compiling() and type(input) is torch.Tensor and (bias is None or bias.dim() == 1)
    place = place_of(weight) if usual else None
    if place is None:
        return _plain_linear(input, weight, bias)
    found: torch.Tensor = _Linear.apply(input, weight, bias, place)  # type: ignore[no-untyped-call]
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, place: GradientPlace
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.place = place
        y = _plain_linear(x, weight, bias)
        # Autograd lets nobody change a view in place that a function like this one has returned.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dy is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        wants_x, _, wants_bias, _ = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.size(-1))
        dx = dy @ weight if wants_x else None
        dw = _weight_gradient(ctx.place, rows.t(), x.reshape(-1, x.size(-1)), ctx.next_functions[1][0])
        return dx, dw, rows.sum(0) if wants_bias else None, None


def _weight_gradient(
    place: GradientPlace, one: torch.Tensor, other: torch.Tensor, accumulate: Node | None
) -> torch.Tensor | None:
    """Their product; None if it is in its place, where `accumulate` would have brought it, or if nobody wants it."""
    if accumulate is None:
        return None
    try:
        accumulates = torch._C._will_engine_execute_node(accumulate)
    except RuntimeError:  # `torch.autograd.grad`: it is what is asked for
        return one @ other
    if not accumulates:
        return None
    if torch.is_grad_enabled() or not place.collector.multiply(place.slot, one, other):
        return one @ other
    return None


def begin(collector: Collector) -> None:
    """From now on, what `F.linear` computes is for this collector's step."""
    global _plain_linear
    with _lock:
        if F.linear is not linear:
            _plain_linear = F.linear
            F.linear = linear
        _computing.add(collector)


def end(collector: Collector) -> None:
    with _lock:
        _computing.discard(collector)
        if not _computing and F.linear is linear:
            F.linear = _plain_linear
