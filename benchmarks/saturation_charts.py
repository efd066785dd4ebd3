"""The pictures of `python -m benchmarks.saturation`, and the values that are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from paceline.plan.compute_times import Stragglers

# The palette of Okabe and Ito: told apart by everybody, and by their marks in print.
BLUE, ORANGE, GREEN, PINK, BLACK = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000"
THEIRS: dict[str, Any] = {
    "marker": "s",
    "linestyle": "",
    "markersize": 8,
    "markerfacecolor": "white",
    "markeredgewidth": 1.8,
}


@dataclass(frozen=True)
class NullSteps:
    """Steps that only fetch parameters; seconds by number of workers."""

    workers: list[int]
    ours: dict[str, list[float]]
    theirs: dict[str, dict[int, float]]
    sparse_s: tuple[float, float]
    link: float
    message_s: float
    fixed_s: float


@dataclass(frozen=True)
class Backups:
    """50 workers and some spare ones; and 100, of which some are not waited for."""

    spares: list[int]
    of_50_s: list[float]
    gains: list[float]
    dropped: list[int]
    of_100_s: list[float]
    to_converge: list[float]
    times: Stragglers
    compute_s: float
    fastest: tuple[int, float]  # published: how many spares, seconds
    best: tuple[int, float]  # published: how many spares, gain


@dataclass(frozen=True)
class Inception:
    """Inception-v3, by number of workers, and by rule."""

    workers: list[int]
    images_per_s: dict[str, list[float]]
    speed_ups: dict[str, list[float]]
    images_published: dict[int, float]
    speed_ups_published: dict[int, float]
    paths: dict[str, dict[str, float]]  # of the largest number of workers
    compute_s: float
    batch: int


@dataclass(frozen=True)
class SpeedUps:
    """Curves through one published point each."""

    dense: dict[str, list[tuple[int, float]]]
    sparse: list[tuple[int, float]]
    ratios: dict[str, float]  # seconds of computing for each second of the model on a link
    sparse_s: float
    rows_bytes: float
    published: dict[str, tuple[int, float]]
    dense_on_50: tuple[float, float]
    no_bytes_on_50: float  # sync, of a model that has nothing to exchange


@dataclass(frozen=True)
class OwnRuns:
    """Samples a second of four replicas, one of them slow: measured, and simulated."""

    samples_per_s: dict[str, tuple[float, float]]
    beyond_s: float  # of a step, beside computing


class Chart:
    """Draws into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, figure: Any, name: str) -> None:
        figure.savefig(self.folder / f"saturation-{name}.png", dpi=130, metadata={"Software": None})
        plt.close(figure)

    def null_steps(self, found: NullSteps) -> None:
        figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
        for (name, steps), colour in zip(found.ours.items(), (BLUE, ORANGE, GREEN), strict=True):
            axes.plot(found.workers, [1000 * s for s in steps], "-", color=colour, label=f"{name}: simulated")
            x, y = zip(*found.theirs[name].items(), strict=True)
            axes.plot(x, [1000 * s for s in y], color=colour, label=f"{name}: published", **THEIRS)
        low, high = (1000 * s for s in found.sparse_s)
        axes.fill_between([1, 100], low, high, color=PINK, alpha=0.3, label="sparse, any table: published range")
        _ticks(axes.xaxis, found.workers)
        _log(axes, [1, 3, 10, 30, 100, 300, 1000, 3000, 10000])
        axes.set_xlabel("workers, fetching from 16 servers")
        axes.set_ylabel("ms a step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
        self.save(figure, "servers")

    def backups(self, found: Backups) -> None:
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
        left.plot(found.spares, found.of_50_s, "-o", color=BLUE, markersize=4, label="simulated, s a step")
        left.plot(*found.fastest, color=BLUE, label="published, fastest", **THEIRS)
        left.set_xlabel("spare workers b, beside 50")
        left.set_ylabel("seconds a step", color=BLUE)
        gain = left.twinx()
        gain.plot(
            found.spares, [100 * g for g in found.gains], "--D", color=ORANGE, markersize=4, label="simulated, gain"
        )
        gain.plot(found.best[0], 100 * found.best[1], color=ORANGE, label="published, best gain", **THEIRS)
        gain.set_ylabel("% gained for its cost", color=ORANGE)
        gain.set_ylim(-6, 14)
        left.set_ylim(1.85, 2.35)
        handles = [*left.get_legend_handles_labels()[0], *gain.get_legend_handles_labels()[0]]
        left.legend(handles=handles, fontsize=8, loc="upper right")
        left.set_title("50 + b workers", fontsize=10)
        left.grid(alpha=0.3)
        right.plot(found.dropped, found.of_100_s, "-o", color=BLUE, markersize=4, label="simulated, s a step")
        right.set_ylabel("seconds a step", color=BLUE)
        right.set_xlabel("spare workers b, of 100")
        converge = right.twinx()
        converge.plot(
            found.dropped, found.to_converge, "--D", color=GREEN, markersize=4, label="simulated, time to converge"
        )
        converge.axvline(4, color=BLACK, linestyle=":", label="published best: 96 + 4")
        converge.set_ylabel("time to converge, over that with none", color=GREEN)
        handles = [*right.get_legend_handles_labels()[0], *converge.get_legend_handles_labels()[0]]
        right.legend(handles=handles, fontsize=8, loc="upper center")
        right.set_title("100 workers, the first 100 - b are accepted", fontsize=10)
        right.grid(alpha=0.3)
        self.save(figure, "backups")

    def inception(self, found: Inception) -> None:
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
        for axes, curves, points, label in (
            (left, found.images_per_s, found.images_published, "images a second"),
            (right, found.speed_ups, found.speed_ups_published, "speed-up over one worker alone"),
        ):
            for (rule, values), colour, style in zip(curves.items(), (BLUE, ORANGE), ("-o", "--D"), strict=True):
                axes.plot(found.workers, values, style, color=colour, markersize=4, label=f"{rule}, simulated")
            x, y = zip(*points.items(), strict=True)
            axes.plot(x, y, color=BLACK, label="published", **THEIRS)
            axes.set_xlabel("workers, on 17 servers")
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=9, loc="upper left")
        self.save(figure, "inception")

    def speed_ups(self, found: SpeedUps) -> None:
        figure, axes = plt.subplots(figsize=(9, 5.4), layout="constrained")
        axes.plot([1, 1000], [1, 1000], ":", color=BLACK, linewidth=1, label="every GPU counts in full")
        curves = {**found.dense, "RankBrain": found.sparse}
        for (name, curve), colour, mark in zip(curves.items(), (ORANGE, BLUE, GREEN), "Do^", strict=True):
            x, y = zip(*curve, strict=True)
            axes.plot(x, y, "-", marker=mark, markersize=4, color=colour, label=f"{name}: simulated")
            axes.plot(*found.published[name], color=colour, label=f"{name}: published, fitted to", **THEIRS)
        axes.plot(
            *found.published["Inception, April 2016"],
            color=PINK,
            label="Inception of April 2016: published",
            **{**THEIRS, "marker": "P"},
        )
        low, high = found.dense_on_50
        axes.plot([50, 50], [low, high], color=BLACK, linewidth=5, alpha=0.35, label="dense on 50: published range")
        axes.set_xscale("log")
        _ticks(axes.xaxis, [1, 2, 4, 8, 16, 25, 50, 100, 200, 500, 1000])
        _log(axes, [1, 2, 4, 8, 16, 32, 64, 128, 300, 1000], set_x=False)
        axes.set_xlabel("GPUs")
        axes.set_ylabel("speed-up over one")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper left")
        self.save(figure, "speedups")


def _ticks(axis: Any, values: Sequence[int]) -> None:
    axis.set_ticks(values, [f"{value}" for value in values])


def _log(axes: Any, values: Sequence[int], set_x: bool = True) -> None:
    if set_x:
        axes.set_xscale("log")
        _ticks(axes.xaxis, [1, 2, 5, 10, 25, 50, 100])
    axes.set_yscale("log")
    _ticks(axes.yaxis, values)
    axes.minorticks_off()
