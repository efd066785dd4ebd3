"""The table: a line a way, means and spreads over its repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.compare.spread import OverRepeats
from paceline.compare.summary import WaySummary
from paceline.watch.target import Target

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    "strategy",
    "reached",
    "seconds",
    "with start",
    "updates",
    "samples",
    "metric",
    "sent",
    "thrown away",
    "stale",
)


def rows(summaries: Sequence[WaySummary]) -> list[tuple[str, ...]]:
    """The cells under `COLUMNS`."""
    return [_row(summary) for summary in summaries]


def _row(summary: WaySummary) -> tuple[str, ...]:
    name = summary.way.name
    if summary.failed is not None:
        return (name, "failed", *[""] * (len(COLUMNS) - 2))
    done, wasted, stale = summary.done, summary.over("thrown_away"), summary.over("staleness")
    return (
        name,
        f"{len(summary.reached)}/{len(done)}",
        _text(summary.over("seconds")),
        _text(summary.over("wall_seconds")),
        _text(summary.over("updates")),
        _text(summary.over("samples")),
        _text(summary.over("value")),
        _bytes(summary.over("bytes_sent")),
        f"{wasted.mean:.1%}" if wasted is not None else "–",
        f"{stale.mean:.2f}" if stale is not None else "–",
    )


def draw(summaries: Sequence[WaySummary], target: Target, width: int) -> Table:
    """The table, with spreads below the means where they would not fit beside them."""
    from rich import box
    from rich.table import Table

    cells = [_named(target), *rows(summaries)]
    widest = [max(map(len, column)) for column in zip(*cells, strict=True)]
    narrow = sum(widest) + 2 * len(widest) > width
    table = Table(
        title=f"until {target}",
        box=None if narrow else box.SIMPLE_HEAD,
        title_justify="left",
        padding=(0, 1, 0, 0),
        header_style="dim" if narrow else "bold",
    )
    for number, name in enumerate(cells[0]):
        heading = name.replace(" ", "\n") if narrow else name
        longest_word = max(len(word) for row in cells for word in row[number].split())
        table.add_column(heading, justify="right" if number else "left", min_width=longest_word, vertical="top")
    for row in cells[1:]:
        table.add_row(*(cell.replace(" ± ", "\n± ") if narrow else cell for cell in row))
    return table


def _named(target: Target) -> tuple[str, ...]:
    return tuple(target.metric if column == "metric" else column for column in COLUMNS)


def as_markdown(summaries: Sequence[WaySummary], target: Target) -> str:
    """The same for a document."""
    lines = [_named(target), ("---", *["---:"] * (len(COLUMNS) - 1)), *rows(summaries)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(value: OverRepeats | None) -> str:
    if value is None:
        return "–"
    mean, spread = value.mean, value.deviation
    whole = mean >= 1000
    shown = f"{mean:.0f}" if whole else f"{mean:.3g}"
    return shown if spread is None else f"{shown} ± {f'{spread:.0f}' if whole else f'{spread:.2g}'}"


def _bytes(value: OverRepeats | None) -> str:
    """
    >>> _bytes(OverRepeats(2.5e6, None)), _bytes(OverRepeats(0, None)), _bytes(None)
    ('2.5 MB', '0', '–')
    """
    if value is None:
        return "–"
    if value.mean < 1e5:
        return f"{value.mean / 1e3:.1f} KB" if value.mean else "0"
    return f"{value.mean / 1e6:.3g} MB"
