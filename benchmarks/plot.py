"""Pictures: the ratios, a dot with its spread a line and the bar it is held against; and what a benchmark plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D

from benchmarks.measure import Claim, Plot

# By shape as well as by colour; both readable without telling red from green.
_STYLES = {True: ("o", "#1f6fb4", "reached"), False: ("X", "#d1651a", "not reached"), None: ("o", "#8a8a8a", "no bar")}

# The palette of Okabe and Ito, and a mark each.
_LINES = tuple(
    zip(
        ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8a8a8a"),
        "osD^vPX*",
        strict=True,
    )
)


def draw(claims: Sequence[Claim], path: Path) -> None:
    """Write the picture of these claims, the first one on top."""
    figure, axes = plt.subplots(figsize=(13, 1.4 + 0.32 * len(claims)), layout="constrained")
    for row, claim in enumerate(claims):
        marker, colour, _ = _STYLES[claim.reached]
        axes.plot([min(claim.rounds), max(claim.rounds)], [row, row], color=colour, linewidth=2, alpha=0.5)
        axes.plot(claim.median, row, marker, color=colour, markersize=7)
        bar = claim.at_least if claim.at_least is not None else claim.at_most
        if bar is not None:
            axes.plot([bar, bar], [row - 0.38, row + 0.38], color="black", linewidth=1.6)
    axes.set_yticks(range(len(claims)), [f"{claim.text}   {claim.bar}" for claim in claims], fontsize=8)
    axes.set_ylim(len(claims) - 0.4, -0.6)
    axes.set_xscale("log")
    ticks = [tick for tick in (0.5, 1, 2, 4, 8, 16, 32, 64, 128) if tick <= 2 * max(c.median for c in claims)]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", alpha=0.3)
    axes.axvline(1, color="black", linewidth=0.6, linestyle=":")
    present = {claim.reached for claim in claims}
    handles = [
        Line2D([], [], marker=marker, color=colour, linestyle="", label=label)
        for kind, (marker, colour, label) in _STYLES.items()
        if kind in present
    ]
    handles.append(Line2D([], [], marker="|", markersize=11, color="black", linestyle="", label="bar"))
    figure.legend(handles=handles, fontsize=8, loc="outside lower right", ncols=len(handles))
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)


def draw_curves(plot: Plot, path: Path, title: str) -> None:
    """Write the picture of a benchmark's own plot."""
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for number, curve in enumerate(plot.curves):
        again, kind = divmod(number, len(_LINES))
        colour, marker = _LINES[kind]
        style = ":" if again else "-"
        x, y = zip(*curve.points, strict=True)
        axes.plot(x, y, style, color=colour, marker=marker, markersize=4, linewidth=1.4, label=curve.name)
    if plot.log:
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks = sorted({x for curve in plot.curves for x, _ in curve.points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.set_xlabel(plot.x)
    axes.set_ylabel(plot.y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title(title, fontsize=9, loc="left")
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)
