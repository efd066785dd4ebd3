"""Predicted and measured side by side, over models that no machine is calibrated with, strategies, devices and wires.

    python -m benchmarks.planned               everything that is missing, then the table in docs/planned.md
    python -m benchmarks.planned --seconds 200   as much of it as fits; goes on where it was stopped
    python -m benchmarks.planned --report      the table again, from what was measured

A model is profiled right before it is measured, since this machine is not equally fast all the time; and a yardstick is
laid beside everything, so that what the machine has changed meanwhile can be told from what was predicted wrongly.

What was measured is in docs/planned.json: profiles, and the steps of every run. Predictions are made anew from the
profiles and the calibration whenever the table is written.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.far_server import on_far_server
from benchmarks.yardstick import Yardstick
from paceline.errors import LaunchError
from paceline.launch.emulate import check_permission
from paceline.plan.calibrate import calibrate
from paceline.plan.calibration import Calibration
from paceline.plan.checking import CheckedPlan, check_plan
from paceline.plan.cluster import Cluster
from paceline.plan.far_servers import far_servers
from paceline.plan.kept_profiles import profile_script
from paceline.plan.predict import StepPredictor
from paceline.plan.prediction import Prediction
from paceline.profile.values import Profile
from paceline.rules import Async, Sync
from paceline.split.values import Layout, Stages, Tiles, Wavefront

SCRIPT = str(Path(__file__).parent / "scripts" / "planned_models.py")
DOCS = Path(__file__).parent.parent / "docs"
CORES = 2
ASLEEP = "asleep"  # on many hosts, to see where they saturate
ON_SERVERS = "asleep_longer"  # the same with one server on a host of its own
MOST_WITH_SERVER = 5
MODELS = ("mlp", "gpt", "small", "wide", "conv", "images", "lstm", ASLEEP, ON_SERVERS)
MOST_HOSTS = 8
REGRET = 0.05
CALIBRATED = "calibration"
ENOUGH_S = 2.5
STEPS = 60
TRIES = 3
PROFILE_S = 15.0
DISTURBED = 0.2  # cores that others use
Way = Callable[[StepPredictor], Prediction | None]


class Measured(msgspec.Struct, frozen=True):
    """What a step of one combination took."""

    seconds: float
    low: float
    high: float
    when: str
    yardstick_s: float = 0.0  # beside it; 0: none was laid


class State(msgspec.Struct, kw_only=True):
    """Everything that was measured."""

    calibration: Calibration | None = None
    profiles: dict[str, Profile] = {}
    measured: dict[str, dict[str, Measured]] = {}
    before: dict[str, dict[str, Measured]] = {}  # the same, at another time
    failed: dict[str, str] = {}
    yardstick_s: dict[str, float] = {}  # beside profiles, by model, and beside the calibration


# ── what is compared ─────────────────────────────────────────────────────────────────────────────────────────


def emulated(hosts: int, link: str, calibration: Calibration) -> Cluster:
    return Cluster(
        hosts=hosts,
        link=link,
        cores=max(1, calibration.cores // hosts),
        memory_bytes=calibration.memory_bytes,
        emulated=True,
        hosts_a_core=max(1.0, hosts / calibration.cores),
    )


def here(calibration: Calibration) -> Cluster:
    return Cluster(hosts=1, cores=calibration.cores, memory_bytes=calibration.memory_bytes)


def ways(profile: Profile) -> dict[str, Way]:
    """Returns every way to run a model on this machine, by name."""
    found: dict[str, Way] = {
        "one": lambda p: p.one,
        "mirrored 2": lambda p: p.mirrored(2),
        "mirrored 4": lambda p: p.mirrored(4),
        "servers 2+1": lambda p: p.servers(2, 1),
        "servers 2+2": lambda p: p.servers(2, 2),
        "servers 2+1 async": lambda p: p.servers(2, 1, Async()),
        "servers 2+1 tcp": lambda p: p.servers(2, 1, exchange="tcp"),
    }
    if profile.batchnorms:
        found["mirrored 2 local"] = lambda p: p.mirrored(2, batchnorm="local")
    for trial in profile.cuts:
        if trial.timing is not None and trial.split.devices == CORES:
            name = {Stages: "stages", Layout: "layout", Tiles: "tiles", Wavefront: "wavefront"}[type(trial.split)]
            if name == "layout":
                name = f"layout {'+'.join(trial.split.layout)}"  # type: ignore[union-attr]
            found[name] = lambda p, trial=trial: p.cut(trial)  # type: ignore[misc]
    return found


def ways_on_hosts(hosts: int) -> dict[str, Way]:
    """Returns every way to run a model on so many emulated hosts."""
    return {f"{wire}": (lambda p, wire=wire: p.mirrored(hosts, hosts, wire)) for wire in ("fp32", "bf16", "int8")}


def _with_far_server(hosts: int) -> Way:
    return lambda p: far_servers(p, hosts, hosts, 1, Sync())


HOSTS = ((2, "1gbit"), (2, "100mbit"), (4, "1gbit"))


def combinations(state: State) -> list[tuple[str, str, Cluster, Way]]:
    """Returns (model, name, cluster, way) of everything; models that were not profiled yet have none."""
    calibration = state.calibration
    assert calibration is not None
    found: list[tuple[str, str, Cluster, Way]] = []
    for model in MODELS:
        profile = state.profiles.get(model)
        if profile is None:
            continue
        if model == ASLEEP:
            found.append((model, "one", here(calibration), lambda p: p.one))
            for hosts in range(2, MOST_HOSTS + 1):
                way = ways_on_hosts(hosts)["fp32"]
                found.append((model, f"{hosts} hosts", emulated(hosts, "100mbit", calibration), way))
            continue
        if model == ON_SERVERS:
            for hosts in range(1, MOST_WITH_SERVER + 1):
                # One more has the server. Replicas sleep, so that sharing cores costs them nothing.
                cluster = Cluster(hosts=hosts + 1, link="100mbit", cores=1, memory_bytes=calibration.memory_bytes)
                found.append((model, f"{hosts} hosts, a server", cluster, _with_far_server(hosts)))
            continue
        found += [(model, name, here(calibration), way) for name, way in ways(profile).items()]
        if model in ("mlp", "wide", "gpt", "conv"):
            for hosts, link in HOSTS:
                cluster = emulated(hosts, link, calibration)
                wires = ways_on_hosts(hosts)
                found += [(model, f"{hosts} hosts {link} {name}", cluster, way) for name, way in wires.items()]
    return found


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────


def measure(state: State, path: Path, until: float, only: Sequence[str], yardstick: Yardstick) -> None:
    """Measures what is missing, until it is time."""
    if state.calibration is None:
        print("calibrating", flush=True)
        before = yardstick.seconds()
        state.calibration = calibrate(lambda *_: None)
        state.yardstick_s[CALIBRATED] = (before + yardstick.seconds()) / 2
        save(state, path)
    try:
        check_permission()
        root = True
    except LaunchError:
        root = False
    for model in MODELS:
        if not only or model in only:
            _measure_model(model, state, path, until, root, yardstick)


def _measure_model(model: str, state: State, path: Path, until: float, root: bool, yardstick: Yardstick) -> None:
    """Profiles a model if something of it is missing, and measures that."""
    assert state.calibration is not None

    def missing() -> list[tuple[str, Cluster, Way]]:
        known = state.measured.get(model, {})
        return [
            (name, cluster, way)
            for of, name, cluster, way in combinations(state)
            if of == model and name not in known and f"{model} {name}" not in state.failed
            if root or cluster.hosts == 1
        ]

    if time.monotonic() + PROFILE_S > until or (model in state.profiles and not missing()):
        return
    if model not in state.profiles or any(cluster.hosts == 1 for _, cluster, _ in missing()):
        print(f"profiling {model}", flush=True)
        mailbox_s, before = state.calibration.mailbox_s, yardstick.seconds()
        state.profiles[model] = profile_script(SCRIPT, [model], CORES, [CORES], mailbox_s=mailbox_s)
        state.yardstick_s[model] = (before + yardstick.seconds()) / 2
        # What was measured beside another profile is measured again, but for what a link has decided.
        known = state.measured.get(model, {})
        state.before[model] = {**state.before.get(model, {}), **known}
        state.measured[model] = {name: found for name, found in known.items() if " hosts " in name}
        save(state, path)
    for name, cluster, way in missing():
        if time.monotonic() > until:
            return
        plan = way(StepPredictor(state.profiles[model], state.calibration, cluster))
        if plan is None:
            continue
        before = yardstick.seconds()
        if model == ON_SERVERS:
            checked = on_far_server(plan, SCRIPT, [model], str(cluster.link))
        else:
            checked = undisturbed_check(plan, model, cluster)
        if checked.seconds is None:
            state.failed[f"{model} {name}"] = str(checked.why_not)
            print(f"{model}, {name}: failed, {checked.why_not}", flush=True)
        else:
            now = time.strftime("%Y-%m-%d %H:%M")
            laid = (before + yardstick.seconds()) / 2
            found = Measured(checked.seconds, checked.low, checked.high, now, laid)
            state.measured.setdefault(model, {})[name] = found
            off = plan.step.seconds / checked.seconds - 1
            print(
                f"{model}, {name}: {1000 * checked.seconds:.2f} ms, predicted {1000 * plan.step.seconds:.2f} "
                f"({off:+.0%}), others {checked.load:.2f}",
                flush=True,
            )
        save(state, path)


def undisturbed_check(plan: Prediction, model: str, cluster: Cluster) -> CheckedPlan:
    """Runs a plan; once more, and again, if other programs were busy meanwhile. Returns the fastest."""
    found = []
    for _ in range(TRIES):
        found.append(check_plan(plan, SCRIPT, [model], cluster, steps=STEPS, enough_s=ENOUGH_S))
        if found[-1].seconds is None or found[-1].load < DISTURBED:
            break
    return min(found, key=lambda one: one.seconds if one.seconds is not None else float("inf"))


def save(state: State, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planned", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default all: {', '.join(MODELS)}")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after that")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of planned.json and planned.md")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    path = options.out / "planned.json"
    state = msgspec.json.decode(path.read_bytes(), type=State) if path.exists() else State()
    if not options.report:
        yardstick = Yardstick()
        measure(state, path, time.monotonic() + options.seconds, options.models, yardstick)
        yardstick.close()
    if any(state.measured.values()):
        from benchmarks.planned_page import write_page  # which is made of what is here

        print(write_page(state, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
