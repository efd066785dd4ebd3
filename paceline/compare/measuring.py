"""One run of a comparison: `paceline run`, started as a user would, watched through its events, and what came of it.

How it is started, and read, is `launch/started_run.py`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import LaunchError
from paceline.launch.started_run import StartedRun, last_words, outcome_in, read_events
from paceline.watch.run_folder import EVENTS
from paceline.watch.target import NOT_REACHED, Target

LOOK_EVERY_S = 0.1
_TAIL_BYTES = 8192


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A value of the metric: when it was told."""

    seconds: float
    samples: int
    step: int
    value: float


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one run."""

    way: str
    repeat: int
    command: list[str]
    exit_code: int
    reached: bool
    seconds: float | None  # of training until the target was reached, from the first step on
    wall_seconds: float | None  # the same from the start of the command on
    updates: int  # until the target, or until the end
    samples: int
    value: float | None  # the metric at the end
    best: float | None
    stopped_by: str | None
    curve: list[Point]
    names: list[str]  # of all that was told
    bytes_sent: int | None = None
    late: int | None = None
    dropped: int | None = None
    thrown_away: float | None = None
    staleness: float | None = None
    error: str | None = None  # the last that a run said which failed


def measure(
    way: str, repeat: int, arguments: Sequence[str], folder: Path, target: Target, look: Callable[[str], None]
) -> Measurement:
    """Run `paceline` with these arguments, which name the run folder. `look` is told how far it is, again and again."""
    began = time.time()
    output = folder.with_suffix(".out")
    run = StartedRun(arguments, output)
    try:
        while (code := run.wait(LOOK_EVERY_S)) is None:
            look(_progress(folder / EVENTS))
    except BaseException:
        run.end()
        raise
    return _read(way, repeat, ["paceline", *arguments], code, folder, target, began, output)


def _progress(events: Path) -> str:
    """How far a run is, from the last of its events."""
    with contextlib.suppress(OSError), events.open("rb") as file:
        file.seek(max(0, events.stat().st_size - _TAIL_BYTES))
        for line in reversed(file.read().splitlines()[1:]):
            with contextlib.suppress(msgspec.DecodeError):
                event: dict[str, Any] = msgspec.json.decode(line)
                if event.get("event") == "found":
                    value = "nan" if event["value"] is None else f"{event['value']:.4g}"
                    return f"step {event['step']}, {event['name']} {value}"
                if event.get("event") == "step":
                    return f"step {event['step']}"
    return "starting"


def _read(
    way: str,
    repeat: int,
    command: list[str],
    code: int,
    folder: Path,
    target: Target,
    began: float,
    output: Path,
) -> Measurement:
    events = read_events(folder / EVENTS)
    outcome = outcome_in(events)
    if outcome is None:
        raise LaunchError(f"{way} did not start: {last_words(output) or f'exit code {code}'}")
    told = [e for e in events if e["event"] == "found" and target.is_for(e["name"]) and e["value"] is not None]
    curve = [Point(e["seconds"] or 0.0, e["samples"], e["step"], e["value"]) for e in told]
    seen = outcome.target
    reached = seen.reached if seen is not None else None
    reached_at = next((e["time"] for e in told if target.holds(e["value"])), None)
    return Measurement(
        way=way,
        repeat=repeat,
        command=command,
        exit_code=code,
        reached=reached is not None,
        seconds=reached.seconds if reached is not None else None,
        wall_seconds=round(reached_at - began, 3) if reached_at is not None else None,
        updates=reached.step if reached is not None else outcome.steps,
        samples=reached.samples if reached is not None else outcome.samples,
        value=curve[-1].value if curve else None,
        best=seen.best if seen is not None else None,
        stopped_by=outcome.stopped_by,
        curve=curve,
        names=list(outcome.found),
        bytes_sent=outcome.bytes_sent,
        late=outcome.late,
        dropped=outcome.dropped,
        thrown_away=outcome.thrown_away,
        staleness=outcome.staleness,
        error=last_words(output) if code not in (0, NOT_REACHED) else None,
    )
