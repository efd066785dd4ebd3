"""Linear layers and embeddings whose weight's gradient is written once: where it goes.

Backward makes a gradient in memory of its own, and a hook copies it into the arena. The gradient of a linear layer's
weight is the product of two small matrices, and as large as the weight: to write it there at once saves reading and
writing all of it. That of an embedding is a few rows, and zero elsewhere: to add them there saves making a whole table
of them, for every micro-batch. While a step is computed, `F.linear` and `F.embedding` are therefore ones that know
where their weight's gradient goes; a graph that we run ourselves also has `addmm`, and convolutions on tiles ask for
themselves (`of_convolution`). Their products, and those of layers whose weight's gradient goes the usual way, are made
by the library that is quicker on this processor (`products.py`).

They stand back for whoever wants to see that gradient on its way, or has other plans with it: hooks, autocast, the
compiler, `torch.func`, a gradient that is itself differentiated, `torch.autograd.grad`. They stand back altogether on a
torch that they do not know, and with `PACELINE_PLAIN_TORCH=1` (`torch_private.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.autograd.graph import Node
from torch.utils.weak import WeakTensorKeyDictionary

from paceline import torch_private
from paceline.optim import products
from paceline.optim.postponed import Find, write_convolution, write_product

LEAST_ELEMENTS = 1 << 18  # a megabyte: of a smaller gradient the copy takes less time than an operator in Python
LEAST_OF_CONVOLUTION = 1 << 12  # that of a convolution is not small work, however small it is


class GradientWriter(Protocol):
    """Writes the gradient of one weight, or a summand of it, where it goes."""

    @property
    def ready(self) -> bool:
        """Whether gradients are collected now, and there is one place for the whole of this one."""
        ...

    def write(self, gradient: torch.Tensor) -> None:
        """It is this."""
        ...

    def write_product(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """It is the product of these matrices."""
        ...

    def write_rows(self, numbers: torch.Tensor, rows: torch.Tensor) -> None:
        """It is zero but for these rows, of which the same may come several times."""
        ...


Operator = Callable[..., torch.Tensor]

# torch's, or whatever stood there when the step began
_plain_linear: Operator = F.linear
_plain_embedding: Operator = F.embedding
_writers: Any = WeakTensorKeyDictionary()  # by weight that is being trained
_computing: set[object] = set()
_lock = threading.Lock()


def pays(weight: torch.nn.Parameter) -> bool:
    """Returns whether a layer with this weight is worth an operator of ours, and this torch is known."""
    return (
        type(weight) is torch.nn.Parameter
        and weight.dim() >= 2
        and weight.numel() >= (LEAST_ELEMENTS if weight.dim() == 2 else LEAST_OF_CONVOLUTION)
        and weight.is_floating_point()
        and weight.device.type == "cpu"
        and torch_private.can_follow_gradients()
    )


def register(weight: torch.nn.Parameter, writer: GradientWriter) -> bool:
    """Let `writer` have the gradient of `weight`; returns False if that would not pay, or this torch is not known."""
    if not pays(weight):
        return False
    _writers[weight] = writer
    return True


def unregister(weight: torch.nn.Parameter) -> None:
    _writers.pop(weight, None)


def begin(step: object) -> None:
    """From now on, until its end, what `F.linear` and `F.embedding` compute is for this step."""
    global _plain_linear, _plain_embedding
    with _lock:
        if F.linear is not linear:
            _plain_linear, F.linear = F.linear, linear
        if F.embedding is not embedding:
            _plain_embedding, F.embedding = F.embedding, embedding
        _computing.add(step)


def end(step: object) -> None:
    """The step is over; after the last one of all, both are what they were."""
    with _lock:
        _computing.discard(step)
        if not _computing and F.linear is linear:
            F.linear = _plain_linear
        if not _computing and F.embedding is embedding:
            F.embedding = _plain_embedding


@contextmanager
def as_in_a_step() -> Iterator[None]:
    """Layers compute as in a step of replicas, but for where gradients go: for who measures what that takes."""
    step = object()
    begin(step)
    try:
        yield
    finally:
        end(step)


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What `F.linear` is during a step, and returns."""
    usual = type(input) is torch.Tensor and (bias is None or bias.dim() == 1)
    writer = writer_of(weight) if usual else None
    if writer is None and not (usual and _suit(input, weight)):
        return _plain_linear(input, weight, bias)
    found: torch.Tensor = _Linear.apply(input, weight, bias, writer)  # type: ignore[no-untyped-call]
    return found


def addmm(bias: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns `bias + input @ weight`: a linear layer whose weight lies the other way round."""
    usual = type(input) is torch.Tensor and bias.dim() == 1
    writer = writer_of(weight) if usual else None
    if writer is None and not (usual and _suit(input, weight)):
        return products.linear(input, weight.t(), bias, _plain_addmm) if usual else torch.addmm(bias, input, weight)
    found: torch.Tensor = _AddMM.apply(bias, input, weight, writer)  # type: ignore[no-untyped-call]
    return found


def embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """What `F.embedding` is during a step, and returns."""
    usual = type(input) is torch.Tensor and max_norm is None and not scale_grad_by_freq and not sparse
    writer = writer_of(weight) if usual else None
    if writer is None:
        return _plain_embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    found: torch.Tensor = _Embedding.apply(input, weight, padding_idx, writer)  # type: ignore[no-untyped-call]
    return found


def writer_of(weight: torch.Tensor) -> GradientWriter | None:
    """What may have the gradient of `weight`; None if somebody wants to see it on its way."""
    if torch.compiler.is_compiling():
        return None
    writer: GradientWriter | None = _writers.get(weight)
    if writer is None or torch_private.is_watched(weight) or not _may_stand_in():
        return None
    return writer


def _suit(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a layer is worth an operator of ours also where its gradient goes the usual way: for quick products."""
    if torch.compiler.is_compiling() or type(weight) is not torch.nn.Parameter:
        return False
    return products.suit(input, weight) and _may_stand_in()


def _may_stand_in() -> bool:
    """Whether nobody else has to do with what is computed."""
    return (
        torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch_private.inside_torch_func()
        and not torch_private.inside_forward_derivative()
        and not _somebody_changes_operators()
    )


def _somebody_changes_operators() -> bool:
    """Whether there is a `TorchFunctionMode` that is neither ours nor torch's own."""
    modes = torch_private.function_modes()
    return not all(type(mode).__module__.startswith(("paceline.", "torch.")) for mode in modes)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, writer: GradientWriter | None
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.writer = writer
        return torch_private.not_a_view(products.linear(x, weight, bias, _plain_linear))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dy is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        wants_x, _, wants_bias, _ = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.size(-1))
        dx = products.product(dy, weight) if wants_x else None
        dw = _product(ctx.writer, rows.t(), x.reshape(-1, x.size(-1)), ctx.next_functions[1][0])
        return dx, dw, rows.sum(0) if wants_bias else None, None


class _AddMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, writer: GradientWriter | None
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.writer = writer
        return products.linear(x, weight.t(), bias, _plain_addmm)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dy is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        wants_bias, wants_x, _, _ = ctx.needs_input_grad
        dx = products.product(dy, weight.t()) if wants_x else None
        dw = _product(ctx.writer, x.t(), dy, ctx.next_functions[2][0])
        return dy.sum(0) if wants_bias else None, dx, dw, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, numbers: torch.Tensor, weight: torch.Tensor, padding_idx: int | None, writer: GradientWriter
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(numbers)
        ctx.count = weight.size(0)
        ctx.padding = -1 if padding_idx is None else padding_idx % weight.size(0)
        ctx.writer = writer
        return _plain_embedding(numbers, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dy is None:
            return None, None, None, None
        (numbers,) = ctx.saved_tensors
        flat, rows = numbers.reshape(-1), dy.reshape(-1, dy.size(-1))
        if ctx.padding >= 0:
            kept = flat != ctx.padding
            flat, rows = flat[kept], rows[kept]
        dw = _weight_gradient(
            ctx.writer,
            lambda: ctx.writer.write_rows(flat, rows),
            lambda: torch.ops.aten.embedding_dense_backward(dy, numbers, ctx.count, ctx.padding, False),
            ctx.next_functions[1][0],
        )
        return None, dw, None, None


def of_convolution(writer: GradientWriter | None, find: Find, accumulate: Node | None) -> torch.Tensor | None:
    """What a convolution's backward gives as the gradient of its weight, which `find` finds; with a writer it goes to
    its place by itself, sooner or later."""
    if writer is None:
        return find()
    return _weight_gradient(writer, lambda: write_convolution(writer, find), find, accumulate)


def _plain_addmm(x: torch.Tensor, transposed: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.addmm(bias, x, transposed.t())


def _product(
    writer: GradientWriter | None, one: torch.Tensor, other: torch.Tensor, accumulate: Node | None
) -> torch.Tensor | None:
    """one @ other as the gradient of a weight, by its writer if it has one; None if nobody wants it."""

    def write() -> None:
        assert writer is not None
        write_product(writer, one, other)

    return _weight_gradient(writer, write, lambda: products.gradient(one, other), accumulate)


def _weight_gradient(
    writer: GradientWriter | None,
    write: Callable[[], None],
    whole: Callable[[], torch.Tensor],
    accumulate: Node | None,
) -> torch.Tensor | None:
    """The gradient; None if it goes to its place by itself, instead of by `accumulate`, or if nobody wants it."""
    if accumulate is None:
        return None
    try:
        accumulates = torch_private.backward_will_run(accumulate)
    except RuntimeError:  # `torch.autograd.grad`: it is what is asked for
        return whole()
    if not accumulates:
        return None
    if writer is None or torch.is_grad_enabled() or not writer.ready:
        return whole()
    write()
    return None
