"""The page about predictions: every combination, the errors, the regret, and where it saturates."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.planned import ASLEEP, CALIBRATED, ON_SERVERS, REGRET, Measured, State, combinations
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
    factor: float  # by which the step would be longer at the speed that the machine had when it was measured

    @property
    def error(self) -> float:
        return self.plan.step.seconds / self.measured.seconds - 1

    @property
    def error_at_equal_speed(self) -> float:
        return self.factor * self.plan.step.seconds / self.measured.seconds - 1

    @property
    def inside(self) -> bool:
        return self.plan.step.low <= self.measured.seconds <= self.plan.step.high

    @property
    def inside_at_equal_speed(self) -> bool:
        return self.plan.step.low <= self.measured.seconds / self.factor <= self.plan.step.high


def rows(state: State) -> list[Row]:
    assert state.calibration is not None
    found = []
    for model, name, cluster, way in combinations(state):
        measured = state.measured.get(model, {}).get(name)
        plan = way(StepPredictor(state.profiles[model], state.calibration, cluster)) if measured is not None else None
        if measured is not None and plan is not None:
            where = cluster.words if cluster.hosts > 1 else "here"
            found.append(Row(model, name, where, plan, measured, _factor(state, model, plan, measured)))
    return found


def _factor(state: State, model: str, plan: Prediction, measured: Measured) -> float:
    """Returns by how much a step is longer at the speed of the measurement: parts that were profiled, and parts that
    were calibrated, by the yardstick beside each; what a link takes is always the same."""
    beside_profile, calibrated = (state.yardstick_s.get(of, 0.0) for of in (model, CALIBRATED))
    if not (measured.yardstick_s and beside_profile and calibrated):
        return 1.0
    slower = {"exchange": measured.yardstick_s / calibrated, "link": 1.0}
    of_profile = measured.yardstick_s / beside_profile
    total = sum(part.seconds for part in plan.parts)
    return sum(part.seconds * slower.get(part.name, of_profile) for part in plan.parts) / total


def repeated(state: State) -> list[float]:
    """Returns in order by how much two measurements of the same combination at different times differ: nothing can be
    predicted better than that."""
    pairs = [
        (measured, state.measured.get(model, {}).get(name))
        for model, of_model in state.before.items()
        for name, measured in of_model.items()
    ]
    return sorted(abs(one.seconds / other.seconds - 1) for one, other in pairs if other is not None and one != other)


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
    regretted = regrets(found)
    pairs = (
        [(abs(row.error), row.inside) for row in found],
        [(abs(row.error_at_equal_speed), row.inside_at_equal_speed) for row in found],
    )
    errors = [sorted(error for error, _ in of) for of in pairs]
    inside = [statistics.mean(is_in for _, is_in in of) for of in pairs]
    middle = " | ".join(f"{statistics.median(of):.1%}" for of in errors)
    far = " | ".join(f"{of[int(0.9 * (len(of) - 1))]:.1%}" for of in errors)
    summary = [
        f"| combinations | ≥ 40 | {len(found)} | |",
        f"| median error of the step time | ≤ 5 % | {middle} |",
        f"| 90th percentile | ≤ 15 % | {far} |",
        f"| measurements inside the stated interval | ≥ 90 % | {' | '.join(f'{share:.0%}' for share in inside)} |",
        f"| predicted best within 5 % of the measured best | ≥ 95 % | "
        f"{statistics.mean(entry[-1] <= REGRET for entry in regretted):.0%} of {len(regretted)} | |",
    ]
    if twice := repeated(state):
        far_apart = twice[int(0.9 * (len(twice) - 1))]
        summary.append(
            f"| two measurements of the same step, at different times ({len(twice)}): median, 90th percentile | | "
            f"{statistics.median(twice):.1%} | {far_apart:.1%} |"
        )
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
        "minute to minute. So a yardstick, products and copies of memory, was laid beside each profile and each run. "
        "There are two figures: as it came, and at equal speed, with what was profiled or calibrated made longer or "
        "shorter by as much as the yardstick was. What a link takes is left as it is.",
        "",
        f"Machine: {state.calibration.machine}; calibrated {state.calibration.made} in "
        f"{state.calibration.seconds:.0f} s.",
        "",
        "| | bar | as it came | at equal speed |",
        "| --- | --- | --- | --- |",
        *summary,
        "",
        "| model | strategy | where | predicted | from – to | measured | error | at equal speed | inside |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        step = row.plan.step
        page.append(
            f"| {row.model} | {row.name} | {row.where} | {1000 * step.seconds:.2f} ms | {1000 * step.low:.2f} – "
            f"{1000 * step.high:.2f} | {1000 * row.measured.seconds:.2f} ms | {row.error:+.0%} | "
            f"{row.error_at_equal_speed:+.0%} | {'yes' if row.inside else 'no'} |"
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
