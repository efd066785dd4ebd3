"""A user's script, run as `python train.py …` would run it, inside a process that had something to do first.

`python -m paceline.launch.script train.py …` is the one process that `paceline verify` compares a strategy with: plain
torch, which starts in half the time (`quick_start.py`). A replica does more around it (`replica.py`).
"""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

from paceline.launch.on_import import when_imported
from paceline.launch.quick_start import load_compiler_late
from paceline.launch.resting_collector import rest_while_loading
from paceline.run_place import Place, find_place


def run_script(place: Place) -> None:
    """Run what stands in this process's arguments: a script, or `-m` and a module."""
    if place.recording is not None and place.recording.dtype == "float64":
        when_imported("torch", lambda torch: torch.set_default_dtype(torch.float64))
    is_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[2:] if is_module else sys.argv[1:]
    script = sys.argv[0]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no such flag
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(script))
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        _run_as_main(script)


def _run_as_main(script: str) -> None:
    """As `python` does it: `__file__` is an absolute path, `sys.argv[0]` what was typed (`runpy` makes them one)."""
    loader = SourceFileLoader("__main__", os.path.abspath(script))
    code = loader.source_to_code(loader.get_data(loader.path), loader.path)
    module = ModuleType("__main__")
    vars(module).update(__file__=loader.path, __loader__=loader, __builtins__=builtins)
    sys.modules["__main__"] = module
    exec(code, vars(module))


def begin() -> None:
    """Run a script in a process that may have torch already."""
    run_script(find_place())


if __name__ == "__main__":
    load_compiler_late()
    rest_while_loading()
    begin()
