"""The report of `paceline quantize` as a picture: every layer's size and time before and after, and the model's."""

from __future__ import annotations

from pathlib import Path

from paceline.quantize.values import QuantizeReport

MOST_LAYERS = 40  # the largest; more would not be legible
_FLOAT, _INT8 = "#b8b8b8", "#2b6cb0"


def draw(report: QuantizeReport, path: Path) -> None:
    """Writes the picture, as PNG or SVG by the file's name."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    layers = sorted(report.layers, key=lambda layer: -layer.bytes_before)[:MOST_LAYERS]
    layers = [layer for layer in report.layers if layer in layers]
    height = max(3.0, 0.34 * len(layers) + 1.6)
    figure, (sizes, times, errors) = pyplot.subplots(
        1, 3, figsize=(13, height), sharey=True, layout="constrained", width_ratios=(1.1, 1.1, 0.8)
    )
    places = range(len(layers))
    bar = 0.38
    for axis, before, after in (
        (sizes, [it.bytes_before / 1e3 for it in layers], [it.bytes_after / 1e3 for it in layers]),
        (
            times,
            [it.us_before or 0 for it in layers],
            [(it.us_after if it.int8 else it.us_before) or 0 for it in layers],
        ),
    ):
        axis.barh([place - bar / 2 for place in places], before, bar, color=_FLOAT, label="float32")
        axis.barh([place + bar / 2 for place in places], after, bar, color=_INT8, label="after")
    errors.barh(
        list(places), [100 * (it.error or 0) for it in layers], bar,
        color=[_INT8 if it.int8 else _FLOAT for it in layers],
    )  # fmt: skip
    sizes.set_yticks(list(places), [f"{it.name or '(model)'}  ({'int8' if it.int8 else 'float'})" for it in layers])
    sizes.invert_yaxis()
    sizes.set_xlabel("KB")
    times.set_xlabel("µs for one sample, one core")
    errors.set_xlabel("% of the answers, if alone in int8")
    for axis in (sizes, times, errors):
        axis.grid(axis="x", alpha=0.25)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    sizes.legend(frameon=False, loc="lower right")
    faster = ", ".join(f"{ratio:.2f}× as fast for {rows}" for rows, ratio in report.faster.items())
    figure.suptitle(
        f"{Path(report.path).name}: {report.smaller:.2f}× smaller, {faster}, "
        f"{report.metric} {report.before.value:.4f} → {report.after.value:.4f}",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
