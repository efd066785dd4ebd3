"""A `paceline run` that another command starts, as a user would, and what came of it.

It runs in a process group of its own and dies with the process that started it, however that ends. Everything that is
known of it comes out of its run folder and of what it printed: there is no second way to train.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.launch.outcome import RunOutcome
from paceline.launch.run_template import RunTemplate

END_WITHIN_S = 20.0
MOST_LAST_LINES = 8


class StartedRun:
    """A running `paceline run`; what it prints goes to the file `output`."""

    def __init__(
        self,
        arguments: Sequence[str],
        output: Path,
        *,
        template: RunTemplate | None = None,
        cores: Collection[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`arguments`: of `paceline`. `template`: of whoever starts many. `cores`: all it may use, if any are named."""
        self._own = template is None
        self._template = template or RunTemplate()
        with output.open("wb") as log:
            self._process = self._template.start(arguments, log.fileno(), cores=cores, environment=environment or {})

    def fileno(self) -> int:
        """Returns a descriptor that is readable when it has ended, until `wait` has said so."""
        return self._process.ended

    def wait(self, seconds: float | None = None) -> int | None:
        """Returns its exit code if it ends within that time."""
        code = self._process.wait(seconds)
        if code is not None and self._own:
            self._template.close()
        return code

    def stop(self) -> None:
        """Ask it to end after the step it is at, as Ctrl-C does."""
        self._process.send(signal.SIGINT)

    def end(self) -> None:
        """End all of it at once, and return when it is gone."""
        self._process.send(signal.SIGQUIT)
        if self.wait(END_WITHIN_S) is None:
            self._process.send(signal.SIGKILL)
            self.wait()


def read_events(path: Path) -> list[dict[str, Any]]:
    """All that is whole: the last line of a killed run need not be."""
    events = []
    with contextlib.suppress(OSError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                events.append(msgspec.json.decode(line, type=dict[str, Any]))
    return events


def outcome_in(events: Sequence[Mapping[str, Any]]) -> RunOutcome | None:
    """How the run ended that wrote these, if it has lived to say so."""
    ended = next((event for event in reversed(events) if event["event"] == "ended"), None)
    if ended is None:
        return None
    fields = {name: value for name, value in ended.items() if name not in ("time", "event")}
    for found in fields.get("found", {}).values():  # JSON has no word for what is not a number
        found["value"] = math.nan if found["value"] is None else found["value"]
    return msgspec.convert(fields, RunOutcome)


def last_words(output: Path) -> str:
    """The last lines that a run has printed."""
    with contextlib.suppress(OSError):
        lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
        return "\n".join(lines[-MOST_LAST_LINES:])
    return ""
