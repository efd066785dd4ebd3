"""Speed-up against devices: in the terminal, and as a picture (PNG or SVG, by matplotlib if that is installed)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import InvalidInput, LaunchError
from paceline.plan.saturation import CurvePoint, SpeedupCurve

FORMATS = (".png", ".svg")
_WIDTH, _HEIGHT = 60, 12
_MARKS = "●○◆◇"


def check_plot(path: str) -> Path:
    """Returns the path of a picture, if it can be one."""
    found = Path(path)
    if found.suffix not in FORMATS:
        raise InvalidInput("plot", path, f"give a file that ends in {' or '.join(FORMATS)}")
    if not found.absolute().parent.is_dir():
        raise InvalidInput("plot", path, "its folder does not exist, make it first")
    return found


def in_terminal(curves: Sequence[SpeedupCurve]) -> str:
    """Returns the curves in letters; · is as many times faster as there are devices."""
    points = [point for curve in curves for point in curve.points]
    most_devices, most = max(point.devices for point in points), max(1.5, *(point.speedup for point in points))
    rows = [[" "] * (_WIDTH + 1) for _ in range(_HEIGHT + 1)]

    def put(devices: float, speedup: float, mark: str) -> None:
        column = round((devices - 1) / max(1, most_devices - 1) * _WIDTH)
        row = _HEIGHT - round(min(speedup, most) / most * _HEIGHT)
        rows[row][column] = mark

    for step in range(_WIDTH + 1):
        devices = 1 + step / _WIDTH * (most_devices - 1)
        if devices <= most:
            put(devices, devices, "·")
    for mark, curve in zip(_MARKS, curves, strict=False):
        for before, after in zip(curve.points, curve.points[1:], strict=False):
            for step in range(_WIDTH):
                share = step / _WIDTH
                put(
                    before.devices + share * (after.devices - before.devices),
                    before.speedup + share * (after.speedup - before.speedup),
                    "─",
                )
        for point in curve.points:
            put(point.devices, point.speedup, mark)
    lines = []
    for number, row in enumerate(rows):
        value = most * (_HEIGHT - number) / _HEIGHT
        label = f"{value:5.1f}×" if number % 3 == 0 else " " * 6
        lines.append(f"{label} │{''.join(row).rstrip()}")
    lines.append(f"{' ' * 6} └{'─' * (_WIDTH + 1)}")
    lines.append(f"{' ' * 8}1{f'{most_devices} devices':>{_WIDTH}}")
    legend = [f"{mark} {curve.name}" for mark, curve in zip(_MARKS, curves, strict=False)]
    lines.append(f"{' ' * 8}{'   '.join([*legend, '· one device times their number'])}")
    return "\n".join(lines)


def draw(curves: Sequence[SpeedupCurve], path: Path, title: str, *, estimate: bool = False) -> None:
    """Draws the curves with their intervals into a file."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise LaunchError("a plot needs matplotlib: pip install matplotlib, or leave out --plot") from error
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    most = max(point.devices for curve in curves for point in curve.points)
    top = max(point.high for curve in curves for point in curve.points)
    axes.plot([1, min(most, top)], [1, min(most, top)], color="0.7", linestyle=":", label="times their number")
    for color, curve in zip(("#0072b2", "#d55e00", "#009e73", "#cc79a7"), curves, strict=False):
        devices = [point.devices for point in curve.points]
        axes.plot(devices, [point.speedup for point in curve.points], color=color, marker="o", ms=3.5, label=curve.name)
        low, high = [point.low for point in curve.points], [point.high for point in curve.points]
        axes.fill_between(devices, low, high, color=color, alpha=0.15)
        _mark(axes, curve.saturates, color)
    axes.set_xlabel("devices")
    axes.set_ylabel("samples/s, over those of one device")
    axes.set_xlim(1 if most > 1 else 0.5, most + 0.02 * most)
    axes.set_ylim(0, math.ceil(1.08 * top))
    axes.set_title(title + (" (estimate)" if estimate else ""), fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    (FigureCanvasSVG if path.suffix == ".svg" else FigureCanvasAgg)(figure)
    figure.savefig(path, dpi=150)


def _mark(axes: object, point: CurvePoint, color: str) -> None:
    """Marks where a curve saturates."""
    axes.axvline(point.devices, color=color, linewidth=0.8, linestyle="--", alpha=0.7)  # type: ignore[attr-defined]
    axes.annotate(  # type: ignore[attr-defined]
        f"{point.devices}: {point.speedup:.1f}×",
        (point.devices, point.speedup),
        textcoords="offset points",
        xytext=(-5, 6),
        ha="right",
        fontsize=9,
        color=color,
    )
