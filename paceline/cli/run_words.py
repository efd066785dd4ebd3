"""What is said of a run: its settings before it starts, and what has become of it at its end."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

from paceline.cli.run_plan import RunPlan
from paceline.cli.unused import unused
from paceline.launch.outcome import RunOutcome
from paceline.run_place import INTERRUPTED
from paceline.watch.display import MOST_FOUND
from paceline.watch.found import TargetSeen
from paceline.watch.target import NOT_REACHED, Target


def in_words(plan: RunPlan) -> str:
    """What was given, what is so by default, and what changes nothing here."""
    idle, given = unused(plan), plan.given_settings
    said: dict[bool, list[str]] = {True: [], False: []}
    for name, value in plan.settings.items():
        if value not in (None, ()) and name not in idle:
            said[name in given].append(f"{_typed(name)} {_shown(name, value)}")
    words = f"given: {', '.join(said[True])}; by default: {', '.join(said[False])}"
    ignored = not_used(plan)
    return f"{words}; {ignored}" if ignored else words


def not_used(plan: RunPlan) -> str:
    """What was given and changes nothing in this plan, and why; empty if there is no such thing."""
    idle = [
        f"{_typed(name)}{'' if value is True else f' {_shown(name, value)}'} ({why})"
        for name, why in unused(plan).items()
        if (value := plan.given.get(name)) is not None
    ]
    return f"not used: {', '.join(idle)}" if idle else ""


def _typed(name: str) -> str:
    return name.removesuffix("_s").replace("_", "-")


def _shown(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return shlex.join(value)
    unit = " s" if name.endswith("_s") else ""
    return f"{value:g}{unit}" if isinstance(value, float) else str(value)


def summary(outcome: RunOutcome, plan: RunPlan, began: float) -> str:
    if outcome.exit_code == INTERRUPTED:
        stopped = f"stopped at step {outcome.steps}"
        if plan.save_on_stop is None:
            return f"{stopped}, nothing was saved (--save-on-stop PATH does)"
        path = Path(plan.save_on_stop)
        saved = path.exists() and path.stat().st_mtime >= began
        return f"{stopped}, {'saved to' if saved else 'nothing was saved to'} {path}"
    if outcome.exit_code == 128 + signal.SIGQUIT:
        return f"told to end at once at step {outcome.steps}"
    if outcome.exit_code not in (0, NOT_REACHED):
        return f"ended with exit code {outcome.exit_code} at step {outcome.steps}"
    if not outcome.steps:
        return f"ended after {outcome.seconds:.1f} s"
    words = [f"{outcome.steps - outcome.resumed_at} steps in {outcome.seconds:.1f} s"]
    if outcome.resumed_at:
        words.append(f"after {outcome.resumed_at} of an earlier run")
    if outcome.samples_per_second:
        words.append(f"{outcome.samples_per_second:.0f} samples/s")
    if outcome.cutting_s is not None:
        words.append(f"cut in {outcome.cutting_s:.1f} s")
    if outcome.loss is not None:
        words.append(f"loss {outcome.loss:.4g}")
    words += [f"{name} {found.value:.4g}" for name, found in list(outcome.found.items())[-MOST_FOUND:]]
    if outcome.target is not None:
        words.append(of_target(outcome, outcome.target))
    elif outcome.stopped_by is not None:
        words.append(f"stopped by --{outcome.stopped_by}")
    if outcome.deaths:
        words.append(f"deaths {outcome.deaths}, restarts {outcome.restarts}")
    return ", ".join(words)


def of_unsaved(outcome: RunOutcome, plan: RunPlan, path: Path) -> str | None:
    """That the script has saved nothing of what it has trained, and how the model can still be had."""
    if outcome.saved is not None or outcome.steps <= outcome.resumed_at or plan.no_checkpoints:
        return None
    if plan.join is not None:
        how = f"--keys {plan.keys}" if plan.keys is not None else f"--token {plan.token}"
        name = plan.container or path.name
        save = f"paceline container save {name} model.safetensors --at {plan.join} {how}"
        return f"the script never called trainer.save; the model is still with the servers: {save}"
    if outcome.kept:
        save = f"paceline container save {path} model.safetensors"
        return f"the script never called trainer.save; the model is kept in the run folder: {save}"
    return "the script never called trainer.save, and its model is gone"


def of_target(outcome: RunOutcome, seen: TargetSeen) -> str:
    if seen.reached is not None:
        after = f" after {seen.reached.seconds:.2f} s of training" if seen.reached.seconds is not None else ""
        return f"{seen.target} reached at step {seen.reached.step}{after}"
    if seen.best is None:
        return f"{seen.target} not reached: {Target.parse(seen.target).never_seen(outcome.found)}"
    limit = f" (stopped by --{outcome.stopped_by})" if outcome.stopped_by is not None else ""
    return f"{seen.target} not reached{limit}, the best was {seen.best:.4g}"
