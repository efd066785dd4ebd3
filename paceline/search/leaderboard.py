"""Trials, best first: those that went to their end by their metric, then those that were ended early, then failures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.search.goal import Goal
from paceline.search.tune_folder import TrialRecord
from paceline.trial_values import Value

_ENDS = {"done": 0, "pruned": 1, "failed": 2}


def ranked(records: Iterable[TrialRecord], goal: Goal) -> list[TrialRecord]:
    """Best first; of equals, the one that was begun first."""

    def place(record: TrialRecord) -> tuple[int, float, int]:
        return _ENDS[record.end], goal.order(record.metric) if record.metric is not None else 0.0, record.number

    return sorted(records, key=place)


@dataclass(frozen=True)
class RunningTrial:
    """A trial that has not ended, as far as it is."""

    number: int
    values: dict[str, Value]
    steps: int
    metric: float | None
    folds: str = ""  # done of all


def shown(value: Value | None) -> str:
    """
    >>> shown(0.00123456), shown(128), shown("relu"), shown(None)
    ('0.001235', '128', 'relu', '–')
    """
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def columns(names: Sequence[str], goal: Goal) -> tuple[str, ...]:
    return ("", "trial", goal.metric, *names, "steps", "seconds", "")


def row(place: int, record: TrialRecord, names: Sequence[str]) -> tuple[str, ...]:
    """The cells of a trial that has ended."""
    how = {"done": "", "pruned": "ended early", "failed": "failed"}[record.end]
    if record.starts > max(1, len(record.folds)):
        how = f"{how}, {record.starts} starts".removeprefix(", ")
    metric = shown(record.metric)
    if len(record.folds) > 1:
        mean = sum(record.folds) / len(record.folds)
        spread = (sum((fold - mean) ** 2 for fold in record.folds) / (len(record.folds) - 1)) ** 0.5
        metric = f"{metric} ± {spread:.2g}"
    values = [shown(record.values[name]) for name in names]
    number = str(place) if record.end == "done" else ""
    return (number, str(record.number), metric, *values, str(record.steps), f"{record.seconds:.1f}", how)


def as_markdown(records: Sequence[TrialRecord], names: Sequence[str], goal: Goal) -> str:
    """The leaderboard for a document; `records`: best first."""
    heading = tuple(name or " " for name in columns(names, goal))
    lines = [heading, ("---:",) * (len(heading) - 1) + ("---",)]
    lines += [row(place, record, names) for place, record in enumerate(records, 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
