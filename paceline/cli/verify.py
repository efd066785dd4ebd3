"""`paceline verify`: does the strategy train the same model as one process?

Runs the script's first steps twice from the same seed, alone and under the strategy, and compares every loss,
gradient, optimizer state, parameter and buffer, and what the model answers. In float64, where rounding is so small that
everything else is a mistake; where that is not possible, in float32, and the verdict says why.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec

from paceline.cli import complain, whole
from paceline.cli.checks import check, check_script
from paceline.cli.cut import add_cut_arguments
from paceline.cli.run_flags import add_server_arguments, add_strategy_arguments
from paceline.cli.run_plan import RunPlan, resolve
from paceline.cli.run_words import not_used
from paceline.cli.unused import unused
from paceline.cli.verified import Precision, VerifyResult
from paceline.errors import LaunchError, StrategyError
from paceline.launch.job import run_alone
from paceline.launch.resting_collector import rest_while_loading
from paceline.launch.supervisor import Supervisor
from paceline.rules import Sync
from paceline.run_place import Place, Recording
from paceline.verify.recorded import NOT_ASKED, forget_asked, steps_of, was_asked, was_called
from paceline.watch.display import choose_display
from paceline.watch.run_folder import RunFolder

OUR_ERRORS = "paceline.errors."
EXAMPLES = """\
examples:
  paceline verify train.py --replicas 4
  paceline verify train.py --replicas 3 --steps 20 -- --batch-size 64
  paceline verify train.py --replicas 4 --dtype float32      the very operators of a run, rounding and all

exit code 0: the same numbers to rounding; 1: they differ, and the first tensor that does is named.
Also compared: what the loss logs, what trainer.evaluate, predict and predictor() give in these steps, and after the
last one the loss in eval mode and what the model answers to the call that the loss makes.
What cannot be computed in float64 is compared in float32, and the result says why and what was tolerated.
Dropout draws other random numbers in every replica: switch it off to verify.
"""
DTYPES = ("float64", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline verify SCRIPT [flags] [-- the script's own arguments]"
    parser.description = "Compare the numbers of one process with those of a strategy."
    parser.epilog = EXAMPLES
    add_strategy_arguments(parser)
    add_cut_arguments(parser)
    add_server_arguments(parser)
    group = parser.add_argument_group("comparison")
    group.add_argument("--steps", type=whole("steps", 1), default=5, metavar="N", help="how many, default 5")
    group.add_argument("--dtype", metavar="TYPE", help="float64 (default), or float32: the script as it is")
    group.add_argument(
        "--tolerance", metavar="X", help="of a tensor's largest value, default 1e-12 in float64, 1e-4 in float32"
    )
    group.add_argument("--json", action="store_true", help="the verdict as JSON")


def execute(options: argparse.Namespace) -> int:
    check_script(options.script, module=options.module)
    tolerance = _tolerance(options.tolerance)
    if options.dtype not in (None, *DTYPES):
        raise StrategyError("dtype", options.dtype, f"give one of {', '.join(DTYPES)}")
    plan = resolve(options)
    check(plan)
    precision = _precision(options.dtype, plan)
    if ignored := not_used(plan):
        complain(ignored)
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as scratch:
        alone, distributed, run_folder = (Path(scratch) / name for name in ("alone", "distributed", "run"))
        for folder in (alone, distributed, run_folder):
            folder.mkdir()
        precision = _run_alone(plan, alone, options.steps, precision, may_narrow=options.dtype is None)
        if not steps_of(alone):
            raise LaunchError(f"{plan.script} made no step with a pl.Trainer, whose numbers paceline verify compares")
        not_asked = (alone / NOT_ASKED).read_text() if (alone / NOT_ASKED).exists() else None
        # One that was asked ends with its last step, where all its processes can be asked together.
        asks = was_asked(alone) and _in_step(plan)
        calls = asks and was_called(alone)
        steps = steps_of(alone) if asks else options.steps
        _run_distributed(plan, _recording(plan, distributed, steps, precision, asks=asks, calls=calls), run_folder)
        rest_while_loading()
        from paceline.verify.compare import compare

        if was_asked(alone) and not asks:
            forget_asked(alone)
            not_asked = "under this rule replicas are not at the same step"
        verdict = compare(alone, distributed, tolerance, dtype=precision.dtype)
        result = VerifyResult(verdict, precision, asked=asks, called=calls, not_asked=not_asked)
    print(result.as_json() if options.json else result.in_words(plan))
    return 0 if result.verdict.equal else 1


def _tolerance(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise StrategyError("tolerance", text, "give a number above 0, such as 1e-4")
    return value


def _precision(given: str | None, plan: RunPlan) -> Precision:
    if given == "float32":
        return Precision("float32")
    wire = plan.strategy.wire
    if wire != "fp32" and "wire" not in unused(plan):
        if given is not None:
            raise StrategyError("dtype", given, f"--wire {wire} is of float32 alone, leave one of them out")
        return Precision("float32", f"--wire {wire} is of float32 alone")
    return Precision("float64")


def _in_step(plan: RunPlan) -> bool:
    """Whether all replicas are done with the same step when they are done with their last one."""
    strategy = plan.strategy
    if not strategy.on_servers or strategy.replicas == 1:
        return True
    return strategy.rule == Sync() and not strategy.warmup_steps and not strategy.warmup_epochs


def _recording(
    plan: RunPlan, folder: Path, steps: int, precision: Precision, *, asks: bool, calls: bool = False
) -> Recording:
    tables = plan.strategy.server_processes > 0
    return Recording(str(folder), steps, dtype=precision.dtype, asks=asks, calls=calls, tables=tables)


def _run_alone(plan: RunPlan, folder: Path, steps: int, precision: Precision, *, may_narrow: bool) -> Precision:
    """Records one process. Returns in which precision: a script that cannot be run in float64 is run as it is."""
    outcome = _try_alone(plan, _recording(plan, folder, steps, precision, asks=True))
    if outcome.returncode and precision.dtype == "float64" and may_narrow:
        precision = Precision("float32", f"in float64 the script ends with {_sentence(outcome.stderr)!r}")
        shutil.rmtree(folder)
        folder.mkdir()
        outcome = _try_alone(plan, _recording(plan, folder, steps, precision, asks=True))
    if outcome.returncode:
        if outcome.stderr.rstrip().rpartition("\n")[2].startswith(OUR_ERRORS):  # which say everything by themselves
            raise LaunchError(_sentence(outcome.stderr))
        sys.stderr.write(outcome.stderr)
        raise LaunchError(f"{plan.script} ended with exit code {outcome.returncode} in one process: mend that first")
    return precision


def _try_alone(plan: RunPlan, recording: Recording) -> subprocess.CompletedProcess[str]:
    place = Place(row=0, rows=1, recording=recording, started_by="reference", checkpoints=False)
    return run_alone(["-m", "paceline.launch.script", *plan.job(place).command], place)


def _sentence(errors: str) -> str:
    """The last line of a traceback; of an error of ours, without its class."""
    last = errors.rstrip().rpartition("\n")[2]
    return last.partition(": ")[2] if last.startswith(OUR_ERRORS) else last


def _run_distributed(plan: RunPlan, recording: Recording, path: Path) -> None:
    display = choose_display(plan.name, plain=True, quiet=True)
    folder = RunFolder(path, lambda line: display.say(f"paceline: {line}"))
    place = msgspec.structs.replace(plan.place(path), recording=recording, checkpoints=False)
    job = plan.job(place, container="verify")
    job = replace(job, on_failure="stop", max_restarts=0, shown=False)
    try:
        outcome = Supervisor(job, folder, display).run()
    finally:
        display.close()
        folder.close()
    if outcome.exit_code:
        raise LaunchError(f"{plan.script} ended with exit code {outcome.exit_code} under the strategy")
