"""Modules and functions that are kept whole: one operator of the graph each, computed as they are, where they lie.

A graph has for good what was decided when it was captured, so what decides by values has no graph: which expert gets
which token, how long to go on. `whole(module)` has such a module be one operator. It is the user's own Python in every
call, with the gradients that autograd finds; everything around it is cut as ever.

What the operator gives has to be known when the graph is captured, without a value being computed. So the function is
run once before, and what they give then is noted (`first_run`): classes and shapes, which have to stay as they
are.
"""

from __future__ import annotations

import functools
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from paceline.data.batch_values import tensors_in
from paceline.errors import ModelError
from paceline.graph.inputs import Structure, take_apart
from paceline.optim.models import left_as_it_was
from paceline.torch_private import FORWARD_HOOKS, AnyBatchNorm, times_changed

_MARK = "paceline_whole"
Marked = TypeVar("Marked", bound=Callable[..., Any])  # a module is called too


def whole(kept: Marked) -> Marked:
    """Has a module be computed whole, on one device or on all alike, when the model around it is cut by a layout or
    into stages. Returns it. Also for a class of modules, and for a function of tensors, above their
    first lines: `@pl.whole`.

    >>> experts = whole(nn.Linear(2, 2))
    >>> @whole
    ... def longest(x: torch.Tensor) -> torch.Tensor:
    ...     return x if x.sum() > 0 else -x
    """
    if isinstance(kept, nn.Module) or (isinstance(kept, type) and issubclass(kept, nn.Module)):
        setattr(kept, _MARK, True)
        return kept
    if isinstance(kept, type) or not callable(kept):
        raise ModelError("whole", getattr(kept, "__name__", kept), "give a module, a class of modules or a function")

    @functools.wraps(kept)
    def one_operator(*args: Any, **kwargs: Any) -> Any:
        capturing = _NOW.get(None)
        return kept(*args, **kwargs) if capturing is None else capturing.function(kept, args, kwargs)

    return one_operator  # type: ignore[return-value]


def is_whole(module: nn.Module) -> bool:
    """Returns whether a module is to be kept whole: it is marked, or decides by a value: a BatchNorm without a momentum
    counts its batches."""
    counts = isinstance(module, AnyBatchNorm) and module.momentum is None and module.track_running_stats
    return bool(getattr(module, _MARK, False)) or counts


# ── one call, in a graph ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Noted:
    """What a call of a module has given."""

    tensors: tuple[torch.Tensor, ...]  # without values
    structure: Structure


Tensors = dict[str, torch.Tensor]  # by name
Run = Callable[[Tensors, tuple[Any, ...], dict[str, Any]], Any]  # with what it is given


class WholeCall:
    """An operator: one call of what is kept whole. It takes the tensors that the call is given, and then the parameters
    and buffers of the module."""

    def __init__(
        self, path: str, run: Run, names: list[str], buffers: int, given: Structure, count: int, gives: _Noted
    ) -> None:
        """`count`: how many tensors the call is given; `buffers`: how many of the names are those of buffers."""
        self._run, self._names, self._given, self._count = run, names, given, count
        self.path, self.buffers, self.gives = path, buffers, gives
        # Code that is made of a graph calls it by this.
        self.__name__ = self.__qualname__ = "whole_" + re.sub(r"\W", "_", path)

    def __call__(self, *values: Any) -> tuple[torch.Tensor, ...]:
        args, kwargs = self._given.fill(list(values[: self._count]))
        tensors = dict(zip(self._names, values[self._count :], strict=True))
        returned = self._run(tensors, args, kwargs)
        found, _ = take_apart(returned, "output", partial(LeftOut, self.path))
        shapes, noted = ([tuple(tensor.shape) for tensor in of] for of in (found, self.gives.tensors))
        if shapes != noted:
            raise _refused(
                self.path,
                f"it gives tensors of shapes {shapes} where it gave {noted} at first; what follows from values has to "
                "have one shape, keep more of the model whole or use --replicas",
            )
        return tuple(found)

    def __repr__(self) -> str:
        return f"whole {self.path}"


class LeftOut:
    """In the place of something that a module returns and a graph cannot have, a cache say. It refuses to be used."""

    def __init__(self, path: str, value: Any) -> None:
        self._path, self._kind = path, type(value).__name__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refused(
            self._path, f"the {self._kind} that it returns cannot be used by what is cut; have it return tensors"
        )


# ── capturing ────────────────────────────────────────────────────────────────────────────────────────────────


class NotNoted(Exception):
    """A function is to be kept whole, and `first_run` has not been."""


class Capturing:
    """What is kept whole, while a graph is captured: the modules of a model that are marked, and functions."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {path or "model": module for path, module in model.named_modules() if is_whole(module)}
        self._noted: dict[str, list[_Noted]] = defaultdict(list)
        self._times: dict[str, int] = {}
        self._is_first_run = False
        self.calls: list[WholeCall] = []

    def first_run(self, function: Callable[..., Any], model: nn.Module, given: Any) -> None:
        """Runs the function, and notes what is given by what is kept whole."""
        self._is_first_run = True
        with left_as_it_was(model), self._at_work():
            function(model, given)
        self._is_first_run = False

    @contextmanager
    def as_operators(self) -> Iterator[None]:
        """Has all that is kept whole be one operator each, inside."""
        self._times = defaultdict(int)
        self.calls.clear()
        with self._at_work():
            yield

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        token = _NOW.set(self)
        try:
            with ExitStack() as all_of_them:
                for path, module in self.modules.items():
                    own = {name: getattr(module, name) for name in ("forward", *FORWARD_HOOKS)}
                    another: dict[str, Any] = {
                        name: OrderedDict() for name in FORWARD_HOOKS
                    }  # they belong to what is kept whole
                    forward = partial(self._module, path, module, own)
                    all_of_them.enter_context(_having(module, {**another, "forward": forward}))
                yield
        finally:
            _NOW.reset(token)

    def _module(self, path: str, module: nn.Module, own: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        def as_it_is() -> Any:
            with _having(module, own):
                return module(*args, **kwargs)

        tensors = dict(module.named_parameters()), dict(module.named_buffers())
        return self._call(path, partial(torch.func.functional_call, module), as_it_is, tensors, args, kwargs)

    def function(self, kept: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function that is kept whole."""

        def run(_: Tensors, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return kept(*args, **kwargs)

        return self._call(kept.__qualname__, run, lambda: kept(*args, **kwargs), ({}, {}), args, kwargs)

    def _call(
        self, path: str, run: Run, as_it_is: Callable[[], Any], tensors: tuple[Any, Any], args: Any, kwargs: Any
    ) -> Any:
        if self._is_first_run:
            return self._note(path, as_it_is, (args, kwargs))
        if not self._noted:
            raise NotNoted
        if self._times[path] == len(self._noted[path]):
            raise _refused(path, "it is called more often the second time than the first; use --replicas")
        noted = self._noted[path][self._times[path]]
        self._times[path] += 1
        given, structure = take_apart((args, kwargs), f"input of {path}")
        parameters, buffers = tensors
        names = [*parameters, *buffers]
        self.calls.append(WholeCall(path, run, names, len(buffers), structure, len(given), noted))
        number = len(self.calls) - 1
        found = torch.ops.paceline.whole(number, given, list(parameters.values()), list(buffers.values()))
        return noted.structure.fill(list(found))

    def _note(self, path: str, as_it_is: Callable[[], Any], given: Any) -> Any:
        before = _versions(given)
        returned = as_it_is()
        if _versions(given) != before:
            raise _refused(path, "it changes a tensor that it is given; have it change a copy")
        tensors, structure = take_apart(returned, "output", partial(LeftOut, path))
        self._noted[path].append(_Noted(tuple(tensor.detach().to("meta") for tensor in tensors), structure))
        return returned

    def without_values(self, number: int) -> list[torch.Tensor]:
        """Returns what a call gives, as far as it is known: new tensors of those shapes."""
        noted = self.calls[number].gives.tensors
        return [torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu") for like in noted]


def _versions(given: Any) -> list[int]:
    """Returns how often each of the tensors was changed in place."""
    return [times_changed(tensor) for tensor in tensors_in(given) if tensor is not None]


def _refused(path: str, why: str) -> ModelError:
    return ModelError("model", f"{path}, which is kept whole", why)


@contextmanager
def _having(module: nn.Module, attributes: dict[str, Any]) -> Iterator[None]:
    """Has a module have these attributes, inside."""
    own = vars(module)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)


_NOW: ContextVar[Capturing] = ContextVar("capturing")
_LIBRARY = torch.library.Library("paceline", "DEF")  # type: ignore[no-untyped-call]
_SCHEMA = "whole(int number, Tensor[] given, Tensor[] parameters, Tensor(a!)[] buffers) -> Tensor[]"
_LIBRARY.define(_SCHEMA)  # type: ignore[no-untyped-call]


@torch.library.register_fake("paceline::whole", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _without_values(number: int, given: Any, parameters: Any, buffers: Any) -> list[torch.Tensor]:
    return _NOW.get().without_values(number)
