"""The learning curves, against time and against samples: a colour a way, a line a repeat."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from paceline.compare.summary import WaySummary
from paceline.watch.target import Target

MISSING = "no plot: matplotlib is not installed, pip install 'paceline[plots]' brings it"


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot(summaries: Sequence[WaySummary], target: Target, folder: Path) -> list[Path]:
    """Draw them as PNG and SVG; the files."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    colours = pyplot.get_cmap("tab10").colors  # type: ignore[attr-defined]
    for number, summary in enumerate(summaries):
        for index, one in enumerate(one for one in summary.done if one.curve):
            look = {"color": colours[number % 10], "linewidth": 1.3, "alpha": 0.85, "marker": ".", "markersize": 4}
            label = summary.way.name if index == 0 else None
            values = [point.value for point in one.curve]
            axes[0].plot([point.seconds for point in one.curve], values, label=label, **look)
            axes[1].plot([point.samples for point in one.curve], values, **look)
    for axis, name in zip(axes, ("seconds of training", "samples"), strict=True):
        axis.axhline(target.value, color="black", linewidth=0.8, linestyle="--")
        axis.set_xlabel(name)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(target.metric)
    axes[0].legend(frameon=False)
    figure.suptitle(f"until {target}", fontsize=11)
    paths = [folder / f"curves.{kind}" for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return paths
