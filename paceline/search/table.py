"""The leaderboard to look at: trials that have ended, best first, and below them those that run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.search.goal import Goal
from paceline.search.leaderboard import RunningTrial, columns, row, shown
from paceline.search.tune_folder import TrialRecord

if TYPE_CHECKING:
    from rich.table import Table


def draw(
    records: Sequence[TrialRecord], running: Sequence[RunningTrial], names: Sequence[str], goal: Goal, rows: int
) -> Table:
    """The table; `records`: best first, of which at most `rows` are drawn."""
    from rich import box
    from rich.table import Table

    table = Table(title=f"looking for the {goal}", box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0))
    for number, name in enumerate(columns(names, goal)):
        table.add_column(name, justify="right" if number < len(names) + 5 else "left", no_wrap=True)
    for place, record in enumerate(records[:rows], 1):
        style = "bold" if place == 1 and record.end == "done" else "" if record.end == "done" else "dim"
        table.add_row(*row(place, record, names), style=style)
    if len(records) > rows:
        table.add_row("", "", f"and {len(records) - rows} more", style="dim")
    for trial in running:
        values = [shown(trial.values[name]) for name in names]
        how = f"runs, {trial.folds}" if trial.folds else "runs"
        table.add_row("", str(trial.number), shown(trial.metric), *values, str(trial.steps), "", how, style="cyan")
    return table
