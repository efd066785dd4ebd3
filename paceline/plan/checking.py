"""Runs plans for a few steps, and ranks them by what they really take. Nothing of these runs is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.launch.with_parent import PARENT_VARIABLE
from paceline.loop.step_clock import FILE, StepTimes
from paceline.plan.cluster import Cluster
from paceline.plan.prediction import Prediction
from paceline.profile.other_load import LoadOfOthers

WARM_UP = 5  # steps that are not counted; cut models hold the loss against its graph at steps 1, 2, 4, 8 …
STEPS = 20
LONGEST_S = 120.0
ENOUGH_S = 6.0  # of steps
_LOOK_EVERY_S = 0.05


class CheckedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and what a step of it took."""

    plan: Prediction
    seconds: float | None
    low: float = 0.0
    high: float = 0.0
    why_not: str | None = None
    load: float = 0.0  # cores that other programs kept busy meanwhile


def check_plans(
    plans: Sequence[Prediction], script: str, arguments: Sequence[str], cluster: Cluster, *, module: bool = False
) -> list[CheckedPlan]:
    """Returns the plans that ran, the fastest first, and then those that failed."""
    checked = [check_plan(plan, script, arguments, cluster, module=module) for plan in plans]
    return sorted(checked, key=_by_speed)


def best_checked(checked: Sequence[CheckedPlan], otherwise: Prediction) -> Prediction:
    """Returns the fastest that ran and trains as one process does; if there is none, the one that was planned."""
    ran = (found.plan for found in checked if found.seconds is not None and found.plan.exact)
    return next(ran, otherwise)


def _by_speed(found: CheckedPlan) -> float:
    if found.seconds is None:
        return float("inf")
    return found.seconds


def check_plan(
    plan: Prediction,
    script: str,
    arguments: Sequence[str],
    cluster: Cluster,
    *,
    module: bool = False,
    steps: int = STEPS,
    enough_s: float = ENOUGH_S,
) -> CheckedPlan:
    """Runs a script by a plan until it has made enough steps, and ends it."""
    # An async replica's turn is one update of as many as there are replicas.
    rule = getattr(plan.strategy, "rule", None)
    updates = plan.strategy.replicas if rule is not None and rule.is_async else 1
    emulated = ["--emulate", f"hosts={plan.hosts},link={cluster.link}"] if plan.hosts > 1 else []
    load = LoadOfOthers()
    with tempfile.TemporaryDirectory(prefix="paceline-check-") as scratch:
        folder = Path(scratch) / "run"
        command = [
            sys.executable,
            "-m",
            "paceline",
            "run",
            *(["-m"] if module else []),
            script,
        ]
        command += [
            *plan.flags(),
            *emulated,
            "--no-checkpoints",
            "--quiet",
            "--run-folder",
            str(folder),
            "--",
            *arguments,
        ]
        with (Path(scratch) / "said").open("wb") as said:
            run = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=said,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},  # whatever happens to this process
                start_new_session=True,
            )
            try:
                lasted = _watch(run, folder, steps, enough_s)
            finally:
                _end(run)
        if len(lasted) < 3:
            said_lines = (Path(scratch) / "said").read_text(errors="replace").strip().splitlines()
            why = said_lines[-1] if said_lines else f"only {len(lasted)} steps were made"
            return CheckedPlan(plan=plan, seconds=None, why_not=why)
    ordered = sorted(seconds / updates for seconds in lasted)
    cut = len(ordered) // 10
    low, high = ordered[cut], ordered[-1 - cut]
    return CheckedPlan(plan=plan, seconds=undisturbed(ordered), low=low, high=high, load=load.cores())


def undisturbed(ordered: Sequence[float]) -> float:
    """Returns the lower quartile: other programs make some steps longer, and none shorter."""
    return ordered[len(ordered) // 4]


def _watch(run: subprocess.Popen[bytes], path: Path, steps: int, enough_s: float) -> list[float]:
    """Returns how long steps took, after the first few; as soon as there are enough, or the run has ended."""
    give_up = time.monotonic() + LONGEST_S
    while time.monotonic() < give_up:
        ended = run.poll() is not None
        lasted = step_times(path)
        if ended or len(lasted) >= steps or (len(lasted) >= 4 and sum(lasted) > enough_s):
            return lasted
        time.sleep(_LOOK_EVERY_S)
    return step_times(path)


def step_times(run_folder: Path) -> list[float]:
    """Returns how long each step took, but for the first few and those that hold a graph against its loss."""
    try:
        found = msgspec.json.decode((run_folder / FILE).read_bytes(), type=StepTimes)
    except (OSError, msgspec.DecodeError):
        return []
    first = found.steps - len(found.seconds) + 1  # number of the first step that is there
    return [
        seconds
        for number, seconds in enumerate(found.seconds, start=first)
        if number > WARM_UP and number & (number - 1)
    ]


def _end(run: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C would, so that it ends what it has started; then for certain."""
    if run.poll() is None:
        with suppress(ProcessLookupError):
            run.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            run.wait(10)
    with suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()
