"""A plan as people read it, and as programs do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.plan.checking import CheckedPlan, best_checked
from paceline.plan.memory_use import MemoryUse
from paceline.plan.plot import in_terminal
from paceline.plan.prediction import Prediction
from paceline.plan.report import PlanReport, few

_LAYERS = 12  # shown


def in_words(
    report: PlanReport,
    arguments: Sequence[str],
    *,
    module: bool,
    top: int,
    price: float | None,
    layers: bool,
    checked: Sequence[CheckedPlan] | None,
) -> str:
    """Returns the whole answer as text."""
    best, profile = report.best, report.profile
    plans = few(report.ordered, best, top)
    estimate = " (estimate)" if best.estimate else ""
    lines = [
        f"{report.script}: {profile.parameters:,} parameters, batch {profile.batch_size}, {profile.optimizer}; "
        f"{report.cluster.words}; {report.considered} plans considered{estimate}",
        "",
    ]
    lines += _table(plans, price)
    lines += ["", *(f"- {reason}" for reason in report.why)]
    lines += _levers(report)
    lines += _memory(report)
    if layers:
        lines += _layers(report)
    if report.cluster.devices > 1:
        lines += ["", in_terminal(report.curves)]
    notes = [
        *(f"beyond what was measured: {what}" for what in best.outside),
        *(f"left out: {w}" for w in report.left_out),
    ]
    lines += ["", *notes] if notes else []
    if checked is not None:
        lines += ["", *_checked(checked)]
        best = best_checked(checked, best)
    lines += ["", *best.command(report.script, arguments, module=module)]
    return "\n".join(lines)


def _table(plans: Sequence[Prediction], price: float | None) -> list[str]:
    heading = ["", "step", "from – to", "samples/s", "speed-up", "memory", "link", "run"]
    rows = [heading]
    for number, plan in enumerate(plans):
        cost = ""
        if plan.run_s is not None:
            cost = _time(plan.run_s)
            if price is not None and plan.device_hours is not None:
                cost += f", {price * plan.device_hours:.2f}"
        rows.append(
            [
                f"{number + 1}. {plan.name}" + ("" if plan.exact else " *"),
                ms(plan.step.seconds),
                f"{ms(plan.step.low)} – {ms(plan.step.high)}",
                f"{plan.samples_per_s:,.0f}",
                f"{plan.speedup:.2f}×",
                f"{plan.memory_bytes / 2**20:,.0f} MiB",
                f"{plan.link_bytes / 2**20:.1f} MiB" if plan.link_bytes else "–",
                cost or "–",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(heading))]
    lines = [
        "  ".join(
            cell.ljust(w) if not column else cell.rjust(w)
            for column, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    if any(not plan.exact for plan in plans):
        lines.append("* does not train as one process does: stale or late gradients")
    return lines


def _levers(report: PlanReport) -> list[str]:
    if not report.levers:
        return []
    lines = ["", "what would make it faster:"]
    for lever in report.levers[:5]:
        lines.append(f"  {lever.gain:5.2f}×  {lever.what} ({lever.how})")
    return lines


def _memory(report: PlanReport) -> list[str]:
    best = report.best
    where = MemoryUse(report.profile, report.cluster).where(best.strategy.replicas, best.hosts)
    told = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in where if size > 2**20)
    return ["", f"memory of a device: {told}"]


def _layers(report: PlanReport) -> list[str]:
    ordered = sorted(report.profile.layers, key=lambda layer: -(layer.forward_s + layer.backward_s))[:_LAYERS]
    width = max((len(f"{layer.name} ({layer.kind})") for layer in ordered), default=0)
    lines = ["", f"{'layer':{width}}  forward  backward  parameters  activations"]
    for layer in ordered:
        lines.append(
            f"{f'{layer.name} ({layer.kind})':{width}}  {ms(layer.forward_s):>7}  {ms(layer.backward_s):>8}  "
            f"{layer.parameters:>10,}  {layer.activation_bytes / 2**20:>7.2f} MiB"
        )
    return lines


def _checked(checked: Sequence[CheckedPlan]) -> list[str]:
    lines = ["run for a few steps, the fastest first:"]
    for found in checked:
        if found.seconds is None:
            lines.append(f"  {found.plan.name}: failed, {found.why_not}")
            continue
        off = found.seconds / found.plan.step.seconds - 1
        lines.append(
            f"  {found.plan.name}: {ms(found.seconds)} a step, predicted {ms(found.plan.step.seconds)} ({off:+.0%})"
        )
    return lines


def as_json(
    report: PlanReport,
    arguments: Sequence[str],
    *,
    module: bool,
    price: float | None,
    checked: Sequence[CheckedPlan] | None,
) -> str:
    """Returns everything as one JSON object."""
    found: dict[str, Any] = msgspec.to_builtins(report)
    best = report.best if checked is None else best_checked(checked, report.best)
    found["command"] = best.command(report.script, arguments, module=module)
    found["saturation"] = {curve.name: msgspec.to_builtins(curve.saturates) for curve in report.curves}
    found["profile"]["flops_per_weight"] = report.profile.flops_per_weight
    found["profile"]["flops_per_activation"] = report.profile.flops_per_activation
    if price is not None and best.device_hours is not None:
        found["price"] = price * best.device_hours
    if checked is not None:
        found["checked"] = [msgspec.to_builtins(entry) for entry in checked]
    return msgspec.json.encode(found).decode()


def ms(seconds: float) -> str:
    """
    >>> ms(0.0001234), ms(0.0123), ms(2.5)
    ('0.123 ms', '12.3 ms', '2.5 s')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
