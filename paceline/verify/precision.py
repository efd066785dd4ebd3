"""In which precision a recorded run computes: in float64, unless it is to be compared as it is.

Two correct runs differ by rounding, and in float32 an optimizer like Adam makes more and more of that. In float64 the
same rounding is nine digits smaller: what is off there is a mistake. So `paceline verify` widens what a script computes
with: torch's default type before its first line, then at the Trainer the model, the optimizer's state, and every batch.

What a script narrows itself, with `.float()` or `dtype=torch.float32` in its forward, stays narrow: nobody can know
that it is not meant. The one process that all are compared with is watched for it, and what it does is written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.data.batch_values import map_tensors
from paceline.errors import ModelError
from paceline.torch_private import DispatchMode, tree_leaves

if TYPE_CHECKING:
    from paceline.run_place import Recording

OnBatch = Callable[[nn.Module, Any], Any]  # a loss, or a metric

# Each with fewer digits than the one before.
NARROW = (torch.float32, torch.float16, torch.bfloat16)
WIDER = dict.fromkeys(NARROW, torch.float64) | {torch.complex64: torch.complex128, torch.complex32: torch.complex128}


class AsItIs:
    """A run whose precision is the script's own business: nothing is changed or watched."""

    narrow = ""  # the narrowest type that the script has computed in by itself, since it was last asked

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        """To be called before anything is done with them."""

    def convert(self, batch: Any) -> Any:
        """Returns the same kind of value, with its tensors as they are computed with."""
        return batch

    def state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns a model's or an optimizer's state, by name, as it is computed with."""
        return state

    def of(self, function: OnBatch) -> OnBatch:
        """Returns the loss or metric as it is computed."""
        return function

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the script computes."""
        yield


class InFloat64(AsItIs):
    """A run in float64."""

    def __init__(self, *, watches: bool, tables: bool) -> None:
        """`watches`: notes what the script narrows. `tables`: sparse embeddings are on servers."""
        self._watches, self._tables = watches, tables

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        torch.set_default_dtype(torch.float64)  # the script may have set another
        for name, module in model.named_modules():
            if self._tables and isinstance(module, nn.Embedding) and module.sparse:
                weight = f"{name}.weight" if name else "weight"
                raise ModelError("model", weight, "a table on servers is of type float32")
            for key, value in list(vars(module).items()):  # constants that are no buffers
                if isinstance(value, torch.Tensor) and value.dtype in WIDER:
                    setattr(module, key, widened(value))
        for tensor in (*model.parameters(), *model.buffers()):
            _widen(tensor)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _widen(parameter)
        for held in optimizer.state.values():
            held.update(self.state(held))

    def convert(self, batch: Any) -> Any:
        return map_tensors(widened, batch)

    def state(self, state: dict[str, Any]) -> dict[str, Any]:
        # A count of steps has no dims and no digits to gain; fused optimizers want it in float32.
        is_wide = {key: isinstance(value, torch.Tensor) and value.dim() > 0 for key, value in state.items()}
        return {key: widened(value) if is_wide[key] else value for key, value in state.items()}

    def of(self, function: OnBatch) -> OnBatch:
        @wraps(function)
        def on_batch(model: nn.Module, batch: Any) -> Any:
            with self.watching():
                return function(model, self.convert(batch))

        return on_batch

    @contextmanager
    def watching(self) -> Iterator[None]:
        if not self._watches:
            yield
            return
        with _Watch() as watch:
            yield
        self.narrow = narrower(self.narrow, watch.narrow)


def open_precision(recording: Recording | None, *, is_reference: bool) -> AsItIs:
    """Returns that of this run. `is_reference`: this is the one process that others are compared with."""
    if recording is None or recording.dtype != "float64":
        return AsItIs()
    return InFloat64(watches=is_reference, tables=recording.tables)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in float64, if it is of a type with fewer digits."""
    return tensor.to(WIDER[tensor.dtype]) if tensor.dtype in WIDER else tensor


def narrower(one: str, other: str) -> str:
    """Returns which of two types, by their names, has fewer digits; an empty one has all.

    >>> narrower("float32", "bfloat16"), narrower("", "float32")
    ('bfloat16', 'float32')
    """
    names = ["", *(name_of(dtype) for dtype in NARROW)]
    return max(one, other, key=names.index)


def name_of(dtype: torch.dtype) -> str:
    """
    >>> name_of(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def _widen(tensor: torch.Tensor) -> None:
    """In place: optimizers, and modules that share a weight, know it by its identity."""
    if tensor.dtype in WIDER:
        if tensor.is_leaf:
            tensor.grad = None  # of no step that is compared
        tensor.data = widened(tensor.data)


class _Watch(DispatchMode):  # type: ignore[no-untyped-call]
    """Looks at what every operator returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.narrow = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and leaf.dtype in NARROW:
                self.narrow = narrower(self.narrow, name_of(leaf.dtype))
        return found
