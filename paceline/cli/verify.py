"""`paceline verify`: does the strategy train the same model as one process?

Runs the script's first steps twice from the same seed, alone and under the strategy, and compares every loss,
gradient, optimizer state, parameter and buffer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paceline.cli import complain, whole
from paceline.cli.checks import check, check_script
from paceline.cli.cut import add_cut_arguments
from paceline.cli.plan import Plan, resolve
from paceline.cli.run import add_server_arguments, add_strategy_arguments, not_used
from paceline.errors import LaunchError, StrategyError
from paceline.launch.job import run_alone
from paceline.launch.supervisor import Supervisor
from paceline.run_place import Place, Recording
from paceline.watch.display import choose_display
from paceline.watch.run_folder import RunFolder

if TYPE_CHECKING:
    from paceline.verify.compare import Verdict

EXAMPLES = """\
examples:
  paceline verify train.py --replicas 4
  paceline verify train.py --replicas 3 --steps 20 -- --batch-size 64

exit code 0: the same numbers to rounding; 1: they differ, and the first tensor that does is named.
Dropout draws other random numbers in every replica: switch it off to verify.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline verify SCRIPT [flags] [-- the script's own arguments]"
    parser.description = "Compare the numbers of one process with those of a strategy."
    parser.epilog = EXAMPLES
    add_strategy_arguments(parser)
    add_cut_arguments(parser)
    add_server_arguments(parser)
    group = parser.add_argument_group("comparison")
    group.add_argument("--steps", type=whole("steps", 1), default=5, metavar="N", help="how many, default 5")
    group.add_argument("--tolerance", metavar="X", help="of a tensor's largest value, default 1e-4")
    group.add_argument("--json", action="store_true", help="the verdict as JSON")


def execute(options: argparse.Namespace) -> int:
    check_script(options.script, module=options.module)
    tolerance = _tolerance(options.tolerance)
    plan = resolve(options)
    check(plan)
    if ignored := not_used(plan):
        complain(ignored)
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as scratch:
        alone, distributed, run_folder = (Path(scratch) / name for name in ("alone", "distributed", "run"))
        for folder in (alone, distributed, run_folder):
            folder.mkdir()
        _run_alone(plan, Recording(str(alone), options.steps))
        if not any(alone.iterdir()):
            raise LaunchError(f"{plan.script} made no step with a pl.Trainer, whose numbers paceline verify compares")
        _run_distributed(plan, Recording(str(distributed), options.steps), run_folder)
        from paceline.verify.compare import compare

        verdict = compare(alone, distributed, tolerance)
    if options.json:
        print(msgspec.json.encode({"equal": verdict.equal, **asdict(verdict)}).decode())
    else:
        print(_in_words(verdict, plan))
    return 0 if verdict.equal else 1


def _tolerance(text: str | None) -> float:
    try:
        value = float(text) if text is not None else 1e-4
    except ValueError:
        value = -1.0
    if not value > 0:
        raise StrategyError("tolerance", text, "give a number above 0, such as 1e-4")
    return value


def _run_alone(plan: Plan, recording: Recording) -> None:
    place = Place(row=0, rows=1, recording=recording, started_by="reference")
    outcome = run_alone(plan.job(place).command, place)
    if outcome.returncode:
        kind, _, sentence = outcome.stderr.rstrip().rpartition("\n")[2].partition(": ")
        if kind.startswith("paceline.errors."):  # an error of ours says everything by itself
            raise LaunchError(sentence)
        sys.stderr.write(outcome.stderr)
        raise LaunchError(f"{plan.script} ended with exit code {outcome.returncode} in one process: mend that first")


def _run_distributed(plan: Plan, recording: Recording, path: Path) -> None:
    display = choose_display(plan.name, plain=True, quiet=True)
    folder = RunFolder(path, lambda line: display.say(f"paceline: {line}"))
    job = plan.job(msgspec.structs.replace(plan.place(path), recording=recording), container="verify")
    job = replace(job, on_failure="stop", max_restarts=0, shown=False)
    try:
        outcome = Supervisor(job, folder, display).run()
    finally:
        display.close()
        folder.close()
    if outcome.exit_code:
        raise LaunchError(f"{plan.script} ended with exit code {outcome.exit_code} under the strategy")


def _in_words(verdict: Verdict, plan: Plan) -> str:
    replicas = f"{plan.strategy.replicas} replica{'s' if plan.strategy.replicas > 1 else ''}"
    split = plan.strategy.settings.get("split")
    against = f"{replicas}{f', {split},' if split is not None else ''} against one process"
    if verdict.first is not None:
        return f"different, {against}: {verdict.first}"
    left_out = f"; {verdict.left_out} elements with gradients of pure rounding left out" if verdict.left_out else ""
    return (
        f"equal, {against}: {verdict.tensors} tensors over {verdict.steps} steps; "
        f"the largest difference is rounding ({verdict.largest}){left_out}"
    )
