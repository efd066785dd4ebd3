"""A `paceline run` that another command starts, as a user would, and what came of it.

It runs in a process group of its own and dies with the process that started it, however that ends. Everything that is
known of it comes out of its run folder and of what it printed: there is no second way to train.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.launch.outcome import RunOutcome
from paceline.launch.with_parent import PARENT_VARIABLE

END_WITHIN_S = 20.0
MOST_LAST_LINES = 8


class StartedRun:
    """A running `paceline run`; what it prints goes to the file `output`."""

    def __init__(
        self,
        arguments: Sequence[str],
        output: Path,
        *,
        cores: Collection[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`arguments`: of `paceline`. `cores`: the only ones that it may use, if any are named."""
        with output.open("wb") as log, _on(cores):
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paceline", *arguments],
                env={**os.environ, **(environment or {}), PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,  # a Ctrl-C is for this process, which then ends that one
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.pid = self._process.pid

    def wait(self, seconds: float) -> int | None:
        """Returns its exit code if it ends within that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def stop(self) -> None:
        """Ask it to end after the step it is at, as Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """End all of it at once, and return when it is gone."""
        self._process.send_signal(signal.SIGQUIT)
        if self.wait(END_WITHIN_S) is None:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def _on(cores: Collection[int]) -> Iterator[None]:
    """Whatever is started inside may use these cores only."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


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
