"""A task for which a script has to be run, as far as its evaluation, in a process of its own: asked and answered in
files.

    who asks       ask("paceline.some.task", request, script)        → the answer, or what is wrong, as an error
    the process    python -m paceline.some.task REQUEST RESULT:       answer(RequestOfTheTask, do_the_task)
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from paceline.errors import LaunchError, PacelineError
from paceline.launch.job import run_alone
from paceline.launch.quick_start import load_compiler_late
from paceline.launch.reached_script import ReachedScript, ScriptEnded
from paceline.launch.resting_collector import rest_while_loading
from paceline.run_place import Place

Request = TypeVar("Request", bound=msgspec.Struct)


class TaskRefused(msgspec.Struct, frozen=True):
    """A sentence about what is wrong, in the place of a result."""

    refused: str
    script_ended: bool = False  # what it has said last may tell why


def ask(module: str, request: msgspec.Struct, script: ReachedScript) -> bytes:
    """Has the task done by a process that runs this module, and returns its answer, in JSON."""
    with tempfile.TemporaryDirectory(prefix="paceline-task-") as scratch:
        asked, result = Path(scratch) / "request.json", Path(scratch) / "result.json"
        asked.write_bytes(msgspec.json.encode(request))
        place = Place(row=0, rows=1, started_by="reference", reaching=script.wanted)
        outcome = run_alone(["-m", module, str(asked), str(result)], place)
        found = result.read_bytes() if result.exists() else b""
    answer: dict[str, Any] = json.loads(found) if found else {}
    if "refused" in answer:
        words = outcome.stderr.strip().splitlines() if answer["script_ended"] else ()
        raise LaunchError(f"{answer['refused']}{f': {words[-1]}' if words else ''}")
    sys.stderr.write(outcome.stderr)
    if not found:
        raise LaunchError(f"{script.script} ended with exit code {outcome.returncode} before this was done")
    return found


def answer(kind: type[Request], act: Callable[[Request], msgspec.Struct]) -> NoReturn:
    """Does the task that this process was started for, writes what comes of it, and ends the process."""
    request_path, result_path = sys.argv[1:]
    request = msgspec.json.decode(Path(request_path).read_bytes(), type=kind)
    load_compiler_late()
    rest_while_loading()
    code = 0
    try:
        found: msgspec.Struct = act(request)
    except PacelineError as error:
        found = TaskRefused(str(error), isinstance(error, ScriptEnded))
    except Exception:
        traceback.print_exc()
        code = 1
    if not code:
        Path(result_path).write_bytes(msgspec.json.encode(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a script that was cut off in the middle may have left threads behind
