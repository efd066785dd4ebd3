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


def plot(records: Sequence[TrialRecord], space: SearchSpace, goal: Goal, folder: Path) -> Path | None:
    """Draw it; the file, or None if no trial has told its metric."""
    told = [record for record in records if record.metric is not None]
    done = sorted((record for record in told if record.end == "done"), key=lambda record: record.at_s)
    if not told:
        return None
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    count = 1 + len(space.parameters)
    across = min(COLUMNS, count)
    down = math.ceil(count / across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(4.2 * across, 3.4 * down), sharey=True, squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    _against_time(flat[0], done, told, goal)
    for axis, parameter in zip(flat[1:], space.parameters, strict=False):
        _against(axis, parameter, told, goal)
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
    pyplot.close(figure)
    unfinished.replace(path)
    return path


def _look(record: TrialRecord, best: TrialRecord | None) -> dict[str, Any]:
    if record.end == "pruned":
        return {"marker": "x", "color": "0.6", "s": 22, "zorder": 2}
    if record is best:
        return {"marker": "*", "color": "tab:red", "s": 120, "zorder": 4}
    return {"marker": "o", "color": "tab:blue", "s": 24, "alpha": 0.8, "zorder": 3}


def _best(records: Sequence[TrialRecord], goal: Goal) -> TrialRecord | None:
    done = [record for record in records if record.end == "done" and record.metric is not None]
    return min(done, key=lambda record: (goal.order(record.metric or 0.0), record.number), default=None)


def _against_time(axis: Any, done: Sequence[TrialRecord], told: Sequence[TrialRecord], goal: Goal) -> None:
    best = _best(told, goal)
    labels = {"done": "a trial", "pruned": "ended early"}
    for record in told:
        label = "the best" if record is best else labels.pop(record.end, None)
        axis.scatter(record.at_s, record.metric, label=label, **_look(record, best))
    steps: list[tuple[float, float]] = []
    for record in done:
        assert record.metric is not None
        better = not steps or goal.is_better(record.metric, steps[-1][1])
        steps.append((record.at_s, record.metric if better else steps[-1][1]))
    if steps:
        axis.step(*zip(*steps, strict=True), where="post", color="tab:red", linewidth=1.2, label="best so far")
    axis.set_xlabel("seconds of the search")
    axis.set_xlim(left=0)
    axis.legend(frameon=False, fontsize=8, loc="lower right" if goal.maximize else "upper right")


def _against(axis: Any, parameter: SearchedParameter, told: Sequence[TrialRecord], goal: Goal) -> None:
    best = _best(told, goal)
    values = parameter.values
    places = {str(value): place for place, value in enumerate(values.values)} if isinstance(values, Choices) else None
    for record in told:
        value = record.values[parameter.name]
        where = places[str(value)] if places is not None else value
        axis.scatter(where, record.metric, **_look(record, best))
    if places is not None:
        axis.set_xticks(list(places.values()), list(places))
        axis.set_xlim(-0.5, len(places) - 0.5)
    elif values.log:  # type: ignore[union-attr]
        axis.set_xscale("log")
    axis.set_xlabel(parameter.name)
