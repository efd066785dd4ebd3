"""The page about predictions: every combination, the errors, the regret, and where it saturates."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.planned import ASLEEP, ON_SERVERS, REGRET, Measured, State, combinations
from paceline.plan.predict import StepPredictor
from paceline.plan.prediction import Prediction
from paceline.plan.saturation import NEARLY


class Row(msgspec.Struct, frozen=True):
    """One combination."""

    model: str
    name: str
    where: str
    plan: Prediction
    measured: Measured

    @property
    def error(self) -> float:
        return self.plan.step.seconds / self.measured.seconds - 1

    @property
    def inside(self) -> bool:
        return self.plan.step.low <= self.measured.seconds <= self.plan.step.high


def rows(state: State) -> list[Row]:
    assert state.calibration is not None
    found = []
    for model, name, cluster, way in combinations(state):
        measured = state.measured.get(model, {}).get(name)
        plan = way(StepPredictor(state.profiles[model], state.calibration, cluster)) if measured is not None else None
        if measured is not None and plan is not None:
            where = cluster.words if cluster.hosts > 1 else "here"
            found.append(Row(model, name, where, plan, measured))
    return found


def regrets(found: Sequence[Row]) -> list[tuple[str, str, str, str, float]]:
    """Returns by model and place: the predicted best, the measured best, and how much slower the first is."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        # Async makes other updates: its steps are not to be compared with these.
        if row.plan.exact and row.model not in (ASLEEP, ON_SERVERS):
            groups.setdefault((row.model, row.where), []).append(row)
    told = []
    for (model, where), of_group in groups.items():
        if len(of_group) > 1:
            predicted = max(of_group, key=lambda row: row.plan.samples_per_s)
            measured = min(of_group, key=lambda row: row.measured.seconds)
            regret = predicted.measured.seconds / measured.measured.seconds - 1
            told.append((model, where, predicted.name, measured.name, regret))
    return told


def saturation(found: Sequence[Row], model: str, title: str) -> list[str]:
    """Returns the lines about where replicas on emulated hosts saturate, as predicted and as measured."""
    of_hosts = sorted((row for row in found if row.model == model), key=lambda row: row.plan.devices)
    if len(of_hosts) < 3 or [row.plan.devices for row in of_hosts] != list(range(1, len(of_hosts) + 1)):
        return []
    one = of_hosts[0]
    predicted = [one.plan.step.seconds / row.plan.step.seconds for row in of_hosts]
    measured = [one.measured.seconds / row.measured.seconds for row in of_hosts]

    def point(speedups: Sequence[float]) -> int:
        return next(at for at, speedup in enumerate(speedups, start=1) if speedup >= NEARLY * max(speedups))

    lines = [
        "",
        f"## Where it saturates: {title}",
        "",
        "Computing is a sleep here, so that many hosts fit on these cores; the links are emulated ones of 100 Mbit/s.",
        "",
        f"Predicted at {point(predicted)} replicas, measured at {point(measured)}; the most at "
        f"{1 + predicted.index(max(predicted))} and {1 + measured.index(max(measured))}.",
        "",
        "| replicas | predicted | measured |",
        "| --- | --- | --- |",
    ]
    pairs = zip(predicted, measured, strict=True)
    return [*lines, *(f"| {number} | {p:.2f}× | {m:.2f}× |" for number, (p, m) in enumerate(pairs, start=1))]


def write_page(state: State, folder: Path) -> str:
    """Writes the page, and returns its summary."""
    found = rows(state)
    errors = sorted(abs(row.error) for row in found)
    regretted = regrets(found)
    summary = [
        f"| combinations | ≥ 40 | {len(found)} |",
        f"| median error of the step time | ≤ 5 % | {statistics.median(errors):.1%} |",
        f"| 90th percentile | ≤ 15 % | {errors[int(0.9 * (len(errors) - 1))]:.1%} |",
        f"| measurements inside the stated interval | ≥ 90 % | {statistics.mean(row.inside for row in found):.0%} |",
        f"| predicted best within 5 % of the measured best | ≥ 95 % | "
        f"{statistics.mean(entry[-1] <= REGRET for entry in regretted):.0%} of {len(regretted)} |",
    ]
    assert state.calibration is not None
    page = [
        "# Predicted and measured",
        "",
        "Written by `python -m benchmarks.planned`, which goes on where it was stopped. Models are those of "
        "`benchmarks/scripts/planned_models.py`, none of which a machine is calibrated with. Each was profiled once, "
        "for about ten seconds; what is predicted follows from that and from the calibration. Each combination was "
        "run by `paceline run`, and the lower quartile of its steps is the measurement.",
        "",
        "A link decides many of these; what does not cross one depends on how fast this machine's cores and memory are "
        "at the moment, which other programs, and other machines on the same hardware, change by tens of percent from "
        "minute to minute.",
        "",
        f"Machine: {state.calibration.machine}; calibrated {state.calibration.made} in "
        f"{state.calibration.seconds:.0f} s.",
        "",
        "| | bar | here |",
        "| --- | --- | --- |",
        *summary,
        "",
        "| model | strategy | where | predicted | from – to | measured | error | inside |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        step = row.plan.step
        page.append(
            f"| {row.model} | {row.name} | {row.where} | {1000 * step.seconds:.2f} ms | {1000 * step.low:.2f} – "
            f"{1000 * step.high:.2f} | {1000 * row.measured.seconds:.2f} ms | {row.error:+.0%} | "
            f"{'yes' if row.inside else 'no'} |"
        )
    page += ["", "| model | where | predicted best | measured best | slower by |", "| --- | --- | --- | --- | --- |"]
    page += [f"| {model} | {where} | {p} | {m} | {regret:.0%} |" for model, where, p, m, regret in regretted]
    page += saturation(found, ASLEEP, "mirrored replicas, one a host")
    page += saturation(found, ON_SERVERS, "replicas with one server on a host of its own")
    if state.failed:
        page += ["", "Not run:", ""]
        page += [f"- {name}: {why}" for name, why in state.failed.items()]
    (folder / "planned.md").write_text("\n".join(page) + "\n")
    return "\n".join(summary)
