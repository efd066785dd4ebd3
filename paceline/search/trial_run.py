"""One run of a trial, or of one fold of it: started, looked at, started again if it was killed.

A run that is killed (no memory, a kill -9, the search itself) is started again in the same folder, with the same
values: a script that saves there and resumes goes on, any other begins anew. What all of its starts have told is one
list, by step, so that nothing counts twice.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.launch.run_template import RunTemplate
from paceline.launch.started_run import StartedRun, last_words
from paceline.trial_values import TRIAL_VARIABLE, TrialPlace
from paceline.watch.run_folder import EVENTS

KILLED_FROM = 128  # exit codes above it are signals
CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}  # that a process gives itself


class RunEvents:
    """The events of one run folder, read as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Those since the last look, as far as their lines are whole."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                with contextlib.suppress(msgspec.DecodeError):
                    yield msgspec.json.decode(line, type=dict[str, Any])


class TrialRun:
    """A run of a trial, in all its starts."""

    def __init__(self, place: TrialPlace) -> None:
        self.place = place
        self.folder = Path(place.folder)
        self.told: dict[str, dict[int, float]] = defaultdict(dict)  # by name and step
        self.asked: set[str] = set()  # of `pl.trial()`
        self.steps = 0
        self.asked_to_stop = False
        self.kills = 0  # that this search has seen
        self._codes: list[int] = []  # of replicas that have finished, in the last start
        self._living: set[int] = set()  # replicas of it
        self._started: StartedRun | None = None
        self._times: list[tuple[float, float]] = []  # of each start: its first and its last event
        self._reading: list[RunEvents] = []
        for number in range(1, self._count() + 1):
            self._read_from(number)
        self.look()

    def _count(self) -> int:
        return sum(path.is_dir() for path in self.folder.glob("run-*"))

    def _read_from(self, number: int) -> None:
        self._codes, self._living = [], set()
        self._reading.append(RunEvents(self._run_folder(number) / EVENTS))
        self._times.append((0.0, 0.0))

    def _run_folder(self, number: int) -> Path:
        return self.folder / f"run-{number}"

    @property
    def starts(self) -> int:
        return len(self._reading)

    @property
    def seconds(self) -> float:
        return sum(last - first for first, last in self._times)

    @property
    def is_over(self) -> bool:
        """Whether its script has come to its end in all replicas that lived, also if somebody asked the run to stop, or
        killed it, just then."""
        return set(self._codes) == {0} and not self._living

    # ── a start ──────────────────────────────────────────────────────────────────────────────────────────

    def start(self, command: Sequence[str], cores: Collection[int], template: RunTemplate) -> None:
        """Start it, once more. `command`: of `paceline run`, without its run folder."""
        number = self.starts + 1
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._run_folder(number)
        path.mkdir()  # before the process: this start is counted whatever becomes of it
        flags = [command[0], "--run-folder", str(path), "--quiet", *command[1:]]
        environment = {TRIAL_VARIABLE: msgspec.json.encode(self.place).decode()}
        output = path.with_suffix(".out")
        self._started = StartedRun(flags, output, template=template, cores=cores, environment=environment)
        self._read_from(number)

    def fileno(self) -> int:
        """A descriptor that is readable when it has ended, between `start` and `ended`."""
        assert self._started is not None
        return self._started.fileno()

    def ended(self) -> int:
        """After its end: the exit code."""
        assert self._started is not None
        code = self._started.wait(10.0)
        assert code is not None
        self._started = None
        self.look()
        self.kills += was_killed(code)
        return code

    def stop(self) -> None:
        """Ask it to end after its step."""
        if not self.asked_to_stop and self._started is not None:
            self.asked_to_stop = True
            self._started.stop()

    def end(self) -> None:
        """End it at once."""
        if self._started is not None:
            self._started.end()
            self._started = None

    @property
    def last_words(self) -> str:
        return last_words(self._run_folder(self.starts).with_suffix(".out"))

    # ── what it tells ────────────────────────────────────────────────────────────────────────────────────

    def look(self) -> None:
        """Read what has happened since the last look."""
        for index, reading in enumerate(self._reading):
            for event in reading.new():
                first, _ = self._times[index]
                self._times[index] = (first or event["time"], event["time"])
                self._take(event, is_last=index == len(self._reading) - 1)

    def _take(self, event: dict[str, Any], *, is_last: bool) -> None:
        kind = event["event"]
        if kind == "found":  # JSON has no word for what is not a number
            self.told[event["name"]][event["step"]] = math.nan if event["value"] is None else event["value"]
        elif kind == "asked":
            self.asked.add(event["name"])
        elif kind in ("started", "restarted") and is_last:
            self._living.add(event["replica"])
        elif kind in ("finished", "died", "failed") and is_last:
            self._living.discard(event["replica"])
            self._codes += [event["code"]] if "code" in event else []
        self.steps = max(self.steps, event.get("step") or event.get("steps") or 0)


def has_crashed(code: int) -> bool:
    """Whether that exit code says that the script itself has brought its process down, and is likely to do so again.

    >>> has_crashed(139), has_crashed(137), has_crashed(1)
    (True, False, False)
    """
    return was_killed(code) and abs(code) % KILLED_FROM in CRASHES


def was_killed(code: int) -> bool:
    """Whether that exit code says that something killed the run, and not that its script failed."""
    return code < 0 or code > KILLED_FROM
