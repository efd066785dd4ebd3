"""Linear layers whose weight's gradient is written once: where it goes.

Backward makes a gradient in memory of its own, and a hook copies it into the arena. The gradient of a linear layer's
weight is the product of two small matrices, and as large as the weight: to write it there at once saves reading and
writing all of it. While a step is computed, `F.linear` is therefore one that knows where its weight's gradient goes.

It stands back for whoever wants to see that gradient on its way, or has other plans with it: hooks, autocast, the
compiler, `torch.func`, a gradient that is itself differentiated, `torch.autograd.grad`. It stands back altogether on a
torch that it does not know, and with `PACELINE_PLAIN_TORCH=1` (`torch_private.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import Node
from torch.utils.weak import WeakTensorKeyDictionary

from paceline import torch_private

LEAST_ELEMENTS = 1 << 18  # a megabyte: of a smaller gradient the copy takes less time than an operator in Python

# Writes the product of two matrices where the gradient goes; False, and does nothing, if none is collected now.
WriteProduct = Callable[[torch.Tensor, torch.Tensor], bool]

_plain_linear: Callable[..., torch.Tensor] = F.linear  # torch's, or whatever stood there when the step began
_writers: Any = WeakTensorKeyDictionary()  # by weight that is being trained
_computing: set[object] = set()
_lock = threading.Lock()


def register(weight: torch.nn.Parameter, write: WriteProduct) -> bool:
    """Let `write` have the gradient of `weight`; returns False if that would not pay, or if this torch is not known."""
    pays = (
        type(weight) is torch.nn.Parameter
        and weight.dim() == 2
        and weight.numel() >= LEAST_ELEMENTS
        and weight.is_floating_point()
        and weight.device.type == "cpu"
        and torch_private.can_follow_gradients()
    )
    if pays:
        _writers[weight] = write
    return pays


def unregister(weight: torch.nn.Parameter) -> None:
    _writers.pop(weight, None)


def begin(step: object) -> None:
    """From now on, until its end, what `F.linear` computes is for this step."""
    global _plain_linear
    with _lock:
        if F.linear is not linear:
            _plain_linear = F.linear
            F.linear = linear
        _computing.add(step)


def end(step: object) -> None:
    """The step is over; after the last one of all, `F.linear` is what it was."""
    with _lock:
        _computing.discard(step)
        if not _computing and F.linear is linear:
            F.linear = _plain_linear


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What `F.linear` is during a step, and returns."""
    usual = not torch.compiler.is_compiling() and type(input) is torch.Tensor and (bias is None or bias.dim() == 1)
    write = _writer_of(weight) if usual else None
    if write is None:
        return _plain_linear(input, weight, bias)
    found: torch.Tensor = _Linear.apply(input, weight, bias, write)  # type: ignore[no-untyped-call]
    return found


def _writer_of(weight: torch.Tensor) -> WriteProduct | None:
    """What may have the gradient of `weight`; None if somebody wants to see it on its way."""
    write: WriteProduct | None = _writers.get(weight)
    if (
        write is None
        or torch_private.is_watched(weight)
        or not torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch_private.inside_torch_func()
        or torch_private.inside_forward_derivative()
        or _somebody_changes_operators()
    ):
        return None
    return write


def _somebody_changes_operators() -> bool:
    """Whether there is a `TorchFunctionMode` that is neither ours nor torch's own."""
    modes = torch_private.function_modes()
    return not all(type(mode).__module__.startswith(("paceline.", "torch.")) for mode in modes)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, write: WriteProduct
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.write = write
        return torch_private.not_a_view(_plain_linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dy is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        wants_x, _, wants_bias, _ = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.size(-1))
        dx = dy @ weight if wants_x else None
        dw = _weight_gradient(ctx.write, rows.t(), x.reshape(-1, x.size(-1)), ctx.next_functions[1][0])
        return dx, dw, rows.sum(0) if wants_bias else None, None


def _weight_gradient(
    write: WriteProduct, one: torch.Tensor, other: torch.Tensor, accumulate: Node | None
) -> torch.Tensor | None:
    """Their product; None if it is in its place, where `accumulate` would have brought it, or if nobody wants it."""
    if accumulate is None:
        return None
    try:
        accumulates = torch_private.backward_will_run(accumulate)
    except RuntimeError:  # `torch.autograd.grad`: it is what is asked for
        return one @ other
    if not accumulates:
        return None
    if torch.is_grad_enabled() or not write(one, other):
        return one @ other
    return None
