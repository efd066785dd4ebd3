"""The search as one picture: the metric against time with the best so far, and against each parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.search.goal import Goal
from paceline.search.space import Choices, SearchedParameter, SearchSpace
from paceline.search.tune_folder import TrialRecord

FILE = "leaderboard.png"
COLUMNS = 3
SQUEEZED = 3.0  # so many times as wide as that of the better three quarters, and the rest of an axis is left out


def load_drawing() -> None:
    """Load what `plot` needs, before it does."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401


def plot(records: Sequence[TrialRecord], space: SearchSpace, goal: Goal, folder: Path) -> Path | None:
    """Draw it; the file, or None if no trial has told its metric."""
    told = [record for record in records if record.metric is not None]
    done = sorted((record for record in told if record.end == "done"), key=lambda record: record.at_s)
    if not told:
        return None
    from matplotlib.figure import Figure

    count = 1 + len(space.parameters)
    across = 2 if count == 4 else min(COLUMNS, count)
    down = math.ceil(count / across)
    figure = Figure(figsize=(4.2 * across, 3.4 * down), layout="constrained")
    axes = figure.subplots(down, across, sharey=True, squeeze=False)
    flat = list(axes.flat)
    drawing = _Drawing(told, goal)
    drawing.against_time(flat[0], done)
    for axis, parameter in zip(flat[1:], space.parameters, strict=False):
        drawing.against(axis, parameter)
    if drawing.worst is not None:
        bounds = {"bottom": drawing.worst} if goal.maximize else {"top": drawing.worst}
        flat[0].set_ylim(**bounds)
    for axis in flat[:count]:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in flat[count:]:
        axis.set_visible(False)
    for line in axes:
        line[0].set_ylabel(goal.metric)
    figure.suptitle(f"{len(records)} trials for the {goal}", fontsize=11)
    path = folder / FILE
    unfinished = path.with_name(f"unfinished-{FILE}")
    figure.savefig(unfinished, dpi=130)
    unfinished.replace(path)
    return path


class _Drawing:
    """Draws trials as points, each the same in all panels."""

    def __init__(self, told: Sequence[TrialRecord], goal: Goal) -> None:
        self._told, self._goal = told, goal
        done = [record for record in told if record.end == "done"]
        self._best = min(done, key=lambda record: (goal.order(_metric(record)), record.number), default=None)
        self.worst = _worst_drawn([_metric(record) for record in told], goal)

    def _point(self, axis: Any, where: Any, record: TrialRecord, label: str | None = None) -> None:
        value = _metric(record)
        look: dict[str, Any] = {"marker": "o", "color": "tab:blue", "s": 24, "alpha": 0.8, "zorder": 3}
        if record.end == "pruned":
            look = {"marker": "x", "color": "0.55", "s": 22, "zorder": 2}
        elif record is self._best:
            look = {"marker": "*", "color": "tab:red", "s": 130, "zorder": 4}
        if self.worst is not None and self._goal.is_better(self.worst, value):  # it lies beyond the edge
            value = self.worst
            look |= {"marker": "v" if self._goal.maximize else "^", "clip_on": False}
        axis.scatter(where, value, label=label, **look)

    def against_time(self, axis: Any, done: Sequence[TrialRecord]) -> None:
        labels = {"done": "a trial", "pruned": "ended early"}
        for record in self._told:
            self._point(axis, record.at_s, record, "the best" if record is self._best else labels.pop(record.end, None))
        best_so_far: list[float] = []
        for record in done:
            value = _metric(record)
            is_better = not best_so_far or self._goal.is_better(value, best_so_far[-1])
            best_so_far.append(value if is_better else best_so_far[-1])
        times = [record.at_s for record in done]
        axis.step(times, best_so_far, where="post", color="tab:red", linewidth=1.2, label="best so far")
        axis.set_xlabel("seconds of the search")
        axis.set_xlim(left=0)
        axis.legend(frameon=False, fontsize=8, loc="lower right" if self._goal.maximize else "upper right")

    def against(self, axis: Any, parameter: SearchedParameter) -> None:
        values = parameter.values
        for record in self._told:
            value = record.values[parameter.name]
            self._point(axis, values.values.index(value) if isinstance(values, Choices) else value, record)
        if isinstance(values, Choices):
            axis.set_xticks(range(len(values.values)), [str(value) for value in values.values])
            axis.set_xlim(-0.5, len(values.values) - 0.5)
        else:
            margin = 0.04 * (values.high - values.low)
            axis.set_xlim(values.low - margin, values.high + margin)
            if values.log:
                axis.set_xscale("log")
                factor = (values.high / values.low) ** 0.04
                axis.set_xlim(values.low / factor, values.high * factor)
        axis.set_xlabel(parameter.name)


def _metric(record: TrialRecord) -> float:
    assert record.metric is not None
    return record.metric


def _worst_drawn(values: Sequence[float], goal: Goal) -> float | None:
    """Where the axis ends on its bad side, if a few bad trials would squeeze all others together.

    >>> goal = Goal("accuracy", maximize=True)
    >>> _worst_drawn([0.9, 0.92, 0.93, 0.94, 0.1], goal), _worst_drawn([0.9, 0.92, 0.91, 0.93], goal)
    (0.89, None)
    """
    better_first = sorted(values, key=goal.order)
    best, quarter, worst = better_first[0], better_first[(3 * len(values)) // 4], better_first[-1]
    span = abs(best - quarter)
    if len(values) < 4 or span == 0 or abs(best - worst) <= SQUEEZED * span:
        return None
    return round(quarter - 0.25 * span if goal.maximize else quarter + 0.25 * span, 12)
