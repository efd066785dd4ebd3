"""What Python does beside operators, and so is in no graph: a function prints, or counts in an attribute of a module;
and numbers that a graph has for good, and that a script may change."""

from __future__ import annotations

import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import nn

_PLAIN = (bool, int, float, str, type(None))
# Most of what a module has, and never plain: each call of a cut model looks at all attributes.
_TABLES = frozenset(type(value) for value in vars(nn.Module()).values()) - frozenset(_PLAIN)


@contextmanager
def python_effects(model: nn.Module) -> Iterator[list[str]]:
    """Notes in a list what happens inside: one phrase for each line that prints, and each attribute that changes."""
    found: list[str] = []
    before = _attributes(model)
    out = _Noting(sys.stdout)
    with redirect_stdout(out):
        yield found
    found += [f"it prints at {place}" for place in dict.fromkeys(out.places)]
    after = _attributes(model)
    found += [
        f"it changes {name} of {path or 'the model'}"
        for (path, name), value in after.items()
        if (path, name) in before and before[path, name] != value
    ]


def numbers_used(function: Callable[..., Any], model: nn.Module) -> dict[tuple[str, str], Any]:
    """Returns the plain values that a function can see, by where they are and their name: attributes of the model's
    modules, and what the function itself has around it and in the file that it is in."""
    found = _attributes(model)
    while isinstance(function, (partial, types.MethodType)):
        function = function.func if isinstance(function, partial) else function.__func__
    if isinstance(function, types.FunctionType):
        code = function.__code__
        around = function.__globals__
        seen: dict[tuple[str, str], Any] = {("its file", name): around.get(name) for name in code.co_names}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # nothing in it yet
                seen["its function", name] = cell.cell_contents
        found |= {place: value for place, value in seen.items() if isinstance(value, _PLAIN)}
    return found


def _attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Returns all plain attributes of the modules, by path and name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) not in _TABLES and isinstance(value, _PLAIN)
    }


class _Noting:
    """A stream that passes on what it is given, and notes the user's lines that it comes from."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.places: list[str] = []

    def write(self, text: str) -> int:
        ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
        frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(ours)]
        if frames:
            self.places.append(f"{Path(frames[-1].filename).name}:{frames[-1].lineno}")
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
