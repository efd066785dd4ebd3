"""The report of `paceline quantize` for people: a line a layer, the model before and after, and what to make of it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.quantize.values import LayerReport, QuantizeReport

MOST_NAME = 40
_HEADINGS = ("layer", "kind", "", "size", "", "error", "1 sample", "")


def in_words(report: QuantizeReport) -> list[str]:
    """Returns the table, and the answer in sentences."""
    rows = [_row(layer) for layer in report.layers]
    rest = _rest(report)
    lines = _table([_HEADINGS, *rows, *([rest] if rest else [])])
    before, after = report.before, report.after
    lines += [
        "",
        f"file      {size(before.bytes):>9} → {size(after.bytes):>9}   {report.smaller:.2f}× smaller   {report.path}",
        f"{report.metric:9} {before.value:9.4f} → {after.value:9.4f}   {_drop(report)}",
    ]
    for samples, ratio in report.faster.items():
        name = f"{samples} sample{'s' if samples > 1 else ''}"
        times = f"{before.ms[samples]:6.3g} ms → {after.ms[samples]:6.3g} ms"
        lines.append(f"{name:9} {times}   {ratio:.2f}× as fast on one core")
    if report.onnx is not None:
        onnx = report.onnx
        lines.append(
            f"onnx      {size(onnx.bytes)}, {report.metric} {onnx.value:.4f}, {onnx.ms:.3g} ms in onnxruntime, answers "
            f"differ by {onnx.difference:.1e} of their size   {onnx.path}"
        )
    return [*lines, "", *verdict(report)]


def verdict(report: QuantizeReport) -> list[str]:
    """Returns what it comes to, in sentences."""
    in_float = [layer for layer in report.layers if not layer.int8]
    lines = []
    slower = [samples for samples, ratio in report.faster.items() if ratio < 1]
    if slower:
        of = " and ".join(f"{samples} sample{'s' if samples > 1 else ''}" for samples in slower)
        lines.append(f"It is not faster on this processor for {of}: int8 saves memory here, not time.")
    if in_float:
        lost = [layer.name for layer in in_float if layer.why == "too much is lost"]
        if lost:
            lines.append(f"In float, since too much is lost otherwise: {', '.join(lost)}.")
        for layer in in_float:
            if layer.name not in lost:
                lines.append(f"In float: {layer.name or 'the model'}, {layer.why}.")
    return lines


def size(count: float) -> str:
    """
    >>> size(850), size(1234567)
    ('850 B', '1.23 MB')
    """
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _drop(report: QuantizeReport) -> str:
    point = f"a point is {report.point:.3g}"
    if report.drop > 0:
        return f"{report.drop:.2f} points worse, {report.max_drop:g} allowed ({point}, on {report.samples} samples)"
    return f"{-report.drop:.2f} points better ({point}, on {report.samples} samples)" if report.drop else "the same"


def _row(layer: LayerReport) -> tuple[str, ...]:
    name = layer.name if len(layer.name) <= MOST_NAME else f"…{layer.name[1 - MOST_NAME :]}"
    times = ("", "")
    if layer.us_before is not None and layer.us_after is not None:
        times = (
            f"{_figures(layer.us_before)} → {_figures(layer.us_after)} µs",
            f"{layer.us_before / layer.us_after:.2f}×",
        )
    return (
        name or "(model)",
        layer.kind,
        "int8" if layer.int8 else "float",
        f"{size(layer.bytes_before)} → {size(layer.bytes_after)}",
        f"{layer.bytes_before / layer.bytes_after:.2f}×" if layer.bytes_after else "shared",
        "" if layer.error is None else f"{layer.error:.2%}",
        *times,
    )


def _figures(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _rest(report: QuantizeReport) -> tuple[str, ...] | None:
    """Returns a line about everything that is in no layer: notes, norms, buffers."""
    before = report.before.bytes - sum(layer.bytes_before for layer in report.layers)
    after = report.after.bytes - sum(layer.bytes_after for layer in report.layers)
    return ("(the rest of the file)", "", "", f"{size(before)} → {size(after)}", "", "", "", "") if before > 0 else None


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
