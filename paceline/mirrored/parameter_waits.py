"""Has whoever uses a parameter wait until the last step has updated it.

Where updates overlap with what comes after a step, the next forward begins while the last of its sums are still on
their way. Nobody may see half of an update. So until the step is complete every call of torch in the script's thread is
looked at: among what it is given, parameters are told by where they lie, and views of them likewise. That is true of a
forward, whatever it computes with, and of all that a script does with parameters between two steps.

An extension that is called past torch is not seen, and so modules wait for their own parameters before they are called,
in every thread. What was made of a parameter before the step, such as an array in the same memory, nobody can see used.
"""

from __future__ import annotations

import inspect
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from paceline.memory.model_arena import ModelArena
from paceline.torch_private import add_function_mode, function_modes, remove_function_mode

# These tell nothing of a parameter's values: a few methods, and whatever is no call, such as `shape`, `grad`, `data` or
# `T`, which give what is said about it, or a tensor that lies where it does and is looked at in turn.
_ATTRIBUTES = [found for _, found in inspect.getmembers(torch.Tensor, inspect.isgetsetdescriptor)]
_TELL_NO_VALUES = frozenset(
    {
        *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "stride", "detach", "requires_grad_")),
        *(getattr(found, access) for found in _ATTRIBUTES for access in ("__get__", "__set__", "__delete__")),
    }
)
# In eval mode these have a kernel of their own, but not where somebody looks at the calls of torch.
_OTHERS_WHEN_LOOKED_AT = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class ParameterWaits:
    """Looks at what is used, from the end of a step until it is complete."""

    def __init__(self, arena: ModelArena, wait: Callable[[Sequence[int]], None]) -> None:
        """`wait(chunks)` returns when these are updated; it may `end` this."""
        self._wait = wait
        slots = [slot for slot in arena.layout.slots if slot.group is not None]
        self._first = arena.parameters.data_ptr()
        self._stop = self._first + arena.layout.trained_bytes
        self._starts = [self._first + slot.offset for slot in slots]
        self._chunks: list[list[int]] = [[] for _ in slots]
        for number, chunk in enumerate(arena.layout.chunks):
            for piece in chunk.pieces:
                self._chunks[piece.slot].append(number)
        self._all = range(len(arena.layout.chunks))
        self._awaited: set[int] = set()  # slots that may not be updated yet
        self._mode = LookedAtCalls(self)
        self._hook: RemovableHandle | None = None
        self.thread = 0  # the script's

    def begin(self) -> None:
        """A step ends, in this thread."""
        self.thread = threading.get_ident()
        self._awaited = {slot for slot, chunks in enumerate(self._chunks) if chunks}
        if self._mode not in function_modes():
            add_function_mode(self._mode)
        if self._hook is None:
            self._hook = register_module_forward_pre_hook(self._before_module)

    def end(self) -> None:
        """It is complete."""
        self._awaited = set()
        remove_function_mode(self._mode)  # during a call it is not there, but again afterwards: then `end` again
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def before_call(self, function: Any, given: Iterable[Any]) -> None:
        if self._awaited and function not in _TELL_NO_VALUES:
            self._look(given)

    def _before_module(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        if not module.training and isinstance(module, _OTHERS_WHEN_LOOKED_AT):
            self._wait(self._all)
            if threading.get_ident() == self.thread:
                self.end()
        elif self._awaited:
            inside = isinstance(module, torch.jit.ScriptModule)  # of which no call is seen
            self._look(module.parameters(recurse=inside))

    def _look(self, given: Iterable[Any]) -> None:
        for value in given:
            if isinstance(value, torch.Tensor):
                self._await(value)
            elif isinstance(value, dict):
                self._look(value.values())
            elif isinstance(value, list | tuple):
                self._look(value)
            elif callable(value) and not isinstance(value, type | torch.device):  # what that computes is not seen
                self._wait(self._all)

    def _await(self, tensor: torch.Tensor) -> None:
        try:
            at = tensor.data_ptr()
        except RuntimeError:  # something that stands for another tensor: `torch.func` has such
            self._wait(self._all)
            return
        if self._first <= at < self._stop:
            slot = bisect_right(self._starts, at) - 1
            if slot in self._awaited:
                self._wait(self._chunks[slot])
                self._awaited.discard(slot)


class LookedAtCalls(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Calls of torch."""

    def __init__(self, waits: ParameterWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._waits.before_call(function, (args, kwargs or {}))
        return function(*args, **(kwargs or {}))
