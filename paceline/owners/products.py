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
from torch.utils.weak import WeakTensorKeyDictionary

LEAST_ELEMENTS = 1 << 18  # a megabyte: of a smaller gradient the copy takes less time than an operator in Python

_torch_linear: Callable[..., torch.Tensor] = F.linear
_places: Any = WeakTensorKeyDictionary()  # of weights that are being trained
_computing: set[Collector] = set()
_lock = threading.Lock()


class Collector(Protocol):
    """Collects the gradients of a step, each in its slot."""

    def multiply(self, slot: int, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Have a gradient that is this product where it goes; False if none is collected now."""


@dataclass(frozen=True)
class Place:
    """Where the gradient of one weight goes."""

    collector: Collector
    slot: int

    def take(self, one: torch.Tensor, other: torch.Tensor, accumulate: Node) -> bool:
        """Put the product there, if this backward would have given it to `accumulate`."""
        try:
            is_for_that = torch._C._will_engine_execute_node(accumulate)
        except RuntimeError:  # `torch.autograd.grad`: somebody wants it as a result
            return False
        return is_for_that and not torch.is_grad_enabled() and self.collector.multiply(self.slot, one, other)


def lead(weight: torch.nn.Parameter, collector: Collector, slot: int) -> bool:
    """The gradient of `weight` may be computed where `collector` has it; False if that would not pay."""
    pays = weight.dim() == 2 and weight.device.type == "cpu" and weight.numel() >= LEAST_ELEMENTS
    if pays:
        _places[weight] = Place(collector, slot)
    return pays


def forget(weight: torch.nn.Parameter) -> None:
    _places.pop(weight, None)


def place_of(weight: torch.Tensor) -> Place | None:
    """Where the gradient of `weight` may be computed; None if somebody wants to see it on its way."""
    place: Place | None = _places.get(weight)
    if (
        place is None
        or weight._backward_hooks
        or len(weight._post_accumulate_grad_hooks or ()) > 1  # one is the collector's
        or not torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):
        return None
    return place


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor or (place := place_of(weight)) is None:
        return _torch_linear(x, weight, bias)
    found: torch.Tensor = _Linear.apply(x, weight, bias, place)  # type: ignore[no-untyped-call]
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, place: Place
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.place = place
        return _torch_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.size(-1))
        dx = dy @ weight if wants_x else None
        dw = None
        if wants_weight:
            one, other = rows.t(), x.reshape(-1, x.size(-1))
            if not ctx.place.take(one, other, ctx.next_functions[1][0]):
                dw = one @ other
        return dx, dw, rows.sum(0) if wants_bias else None, None


def begin(collector: Collector) -> None:
    """From now on, what `F.linear` computes is for this collector's step."""
    with _lock:
        _computing.add(collector)
        F.linear = linear  # type: ignore[assignment]


def end(collector: Collector) -> None:
    with _lock:
        _computing.discard(collector)
        if not _computing:
            F.linear = _torch_linear
