"""A script's model, found by running the script, in this process, as far as it takes. Nothing is trained.

- A script that defines `make_model()` is imported, as any module is, and that is called.
- Any other is run as `python train.py …` would run it, until its `trainer.step` is given a first batch: the model is
  the Trainer's, and what its loss calls the model with tells what the model takes. `trainer.resume` does nothing then.
- If it is said what the model takes, the script ends at its `pl.Trainer(model, …)` already, and needs no data.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import msgspec
from torch import nn

from paceline.errors import LaunchError, PacelineError
from paceline.loop.model_found import ModelFound
from paceline.run_place import PLACE_VARIABLE, Place
from paceline.split.cut import Example
from paceline.trial_values import TRIAL_VARIABLE, TrialPlace

MAKE_MODEL = "make_model"


@dataclass(frozen=True)
class ScriptModel:
    """The model of a script, the names of its dims, and how its loss calls it, as far as that is known."""

    model: nn.Module
    dims: dict[str, str] = field(default_factory=dict)
    call: Example | None = None


def find_model(
    script: str, arguments: Sequence[str], *, with_call: bool, trial: TrialPlace | None = None
) -> ScriptModel:
    """Returns the model that the script makes. `with_call`: it is to run until its first batch. `trial`: the one of
    `paceline tune` that the script is to make it for."""
    place = Place(row=0, rows=1, serving="batch" if with_call else "trainer", started_by="reference")
    os.environ[PLACE_VARIABLE] = msgspec.json.encode(place).decode()
    os.environ.pop(TRIAL_VARIABLE, None)
    if trial is not None:
        os.environ[TRIAL_VARIABLE] = msgspec.json.encode(trial).decode()
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    makes = _defines_make_model(script)
    try:
        module = _executed(script, Path(script).stem if makes else "__main__")
        model = getattr(module, MAKE_MODEL)() if makes else None
    except ModelFound as found:
        return ScriptModel(found.model, found.dims, found.call)
    except PacelineError as error:
        raise LaunchError(f"{script} has no model to serve: {error}") from error
    except SystemExit as error:
        if error.code not in (None, 0):
            raise LaunchError(f"{script} ended with {error.code!r} before its model was found") from error
        model = None
    except BaseException as error:
        traceback.print_exc()
        raise LaunchError(f"{script} failed before its model was found: {type(error).__name__}: {error}") from error
    if makes and not isinstance(model, nn.Module):
        raise LaunchError(f"{script}: {MAKE_MODEL}() returned a {type(model).__name__}, let it return the nn.Module")
    if model is None:
        raise LaunchError(f"{script} ended and no model was found: let it call trainer.step, or define {MAKE_MODEL}()")
    return ScriptModel(model)


def _defines_make_model(script: str) -> bool:
    try:
        tree = ast.parse(Path(script).read_bytes(), script)
    except (SyntaxError, ValueError) as error:
        raise LaunchError(f"{script} is no Python file ({error})") from error
    return any(isinstance(node, ast.FunctionDef) and node.name == MAKE_MODEL for node in tree.body)


def _executed(script: str, name: str) -> ModuleType:
    """Returns the script's module, run under this name."""
    loader = SourceFileLoader(name, os.path.abspath(script))
    code = loader.source_to_code(loader.get_data(loader.path), loader.path)
    module = ModuleType(name)
    vars(module).update(__file__=loader.path, __loader__=loader, __builtins__=builtins)
    sys.modules[name] = module
    exec(code, vars(module))
    return module
