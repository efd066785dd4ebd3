"""`paceline tune`: the same script with many hyperparameters, several trials at a time, the best kept.

Every trial is resolved to a plan that `paceline run` would have, and looked at before the first is started. The search
itself is `paceline/search`; here is what can be typed, and what is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.util
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from paceline.cli import complain, whole
from paceline.cli.checks import check, check_memory, check_script
from paceline.cli.cut import add_cut_arguments
from paceline.cli.run_flags import (
    add_bound_arguments,
    add_fault_arguments,
    add_join_arguments,
    add_server_arguments,
    add_strategy_arguments,
)
from paceline.cli.run_plan import RunPlan, resolve
from paceline.cli.run_words import not_used
from paceline.compare.plot import MISSING, can_plot
from paceline.errors import InvalidInput, LaunchError, StrategyError
from paceline.launch.cores import allowed_cores
from paceline.launch.signals import stop_is_interrupt
from paceline.launch.starter import modules_of, pays_for
from paceline.run_place import INTERRUPTED, MOST_NAME
from paceline.search.goal import Goal
from paceline.search.leaderboard import as_markdown, shown
from paceline.search.plot import load_drawing, plot
from paceline.search.proposals import SAMPLERS, SamplerName
from paceline.search.script_arguments import ScriptArguments, find_arguments
from paceline.search.script_text import ScriptText
from paceline.search.space import SearchSpace
from paceline.search.study_journal import PRUNERS, PrunerName
from paceline.search.table import draw
from paceline.search.top import TOP, keep_best
from paceline.search.tune_folder import JOURNAL, TrialRecord, TuneFolder, identity_of
from paceline.search.tuner import Search, Tuner
from paceline.strategy import one_of
from paceline.torch_private import wants_plain_torch
from paceline.trial_values import TrialPlace
from paceline.watch.display import clock
from paceline.watch.kept_folder import script_digest
from paceline.watch.target import never_told, read_time

if TYPE_CHECKING:
    from rich.live import Live

EXAMPLES = """\
what to try, --param once for each:
  lr=log:1e-4..1e-1    a number from a range, evenly in its logarithm      layers=1..8         a whole number
  dropout=0..0.5       evenly; dropout=0..0.5:0.1 in steps of 0.1         width=64,128,256    one of these, or of words

a script is given them as flags of its own (--lr 0.01) if its text names such flags, or where its arguments after -- say
so, as in -- --rate {lr}; or it asks: pl.trial().lr. It has to tell the metric, once an epoch say:
  trainer.evaluate(test_set, accuracy, name="accuracy")   or  trainer.report(0.93)   or  trainer.log(accuracy=0.93)
what it saves into {folder}, which is pl.trial().folder, is the trial's checkpoint, and it can go on from there.

examples:
  paceline tune train.py --param lr=log:1e-4..1e-1 --param width=64,128,256 --trials 20 --parallel 2 --maximize accuracy
  paceline tune train.py --param lr=log:1e-4..1e-1 --minimize loss --prune asha --budget 30m
                                                  bad trials are ended early; no new ones after half an hour
  paceline tune train.py --param width=64,128,256 --param depth=1..3 --sampler grid --maximize accuracy
  paceline tune train.py --param lr=log:1e-4..1e-1 --trials 8 --replicas 2 --maximize accuracy
                                                  every trial trains on two replicas; any strategy of paceline run
  paceline tune train.py --param lr=log:1e-4..1e-1 --folds 5 --maximize accuracy
                                                  cross-validated: the script trains on pl.trial().fold(dataset)
  paceline tune train.py --param lr=log:1e-4..1e-1 --maximize accuracy -- --epochs 5 --save {folder}/model.safetensors
stopped or killed, the same command goes on where it was; with more --trials it adds to them.
"""

DEFAULT_TRIALS = 20
MOST_TRIALS = 10_000
NOT_A_TERMINAL = 120  # letters a line
SHOW_EVERY_S = 0.25
# What is this command's own; all else says how each trial is trained.
_OWN = (
    *("param", "trials", "parallel", "maximize", "minimize", "budget_s", "prune", "folds", "keep", "seed", "sampler"),
    *("folder", "json"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "paceline tune SCRIPT --param NAME=WHAT … --maximize METRIC [flags] [flags of paceline run for each trial] "
        "[-- the script's own arguments]"
    )
    parser.description = "Train a script with many hyperparameters, several trials at a time, and keep the best."
    parser.epilog = EXAMPLES
    what = parser.add_argument_group("what is searched for")
    what.add_argument("--param", action="append", metavar="NAME=WHAT", help="what to try, see below")
    what.add_argument("--maximize", metavar="METRIC", help="that the script tells, such as accuracy")
    what.add_argument("--minimize", metavar="METRIC", help="that the script tells, such as loss")
    what.add_argument("--sampler", metavar="HOW", help="tpe (default, learns from results), random, grid")
    what.add_argument("--seed", type=whole("seed", 0), metavar="N", help="of what is tried and of folds, default 0")
    what.add_argument("--folds", type=whole("folds", 2), metavar="N", help="cross-validate: N runs a trial, their mean")
    how = parser.add_argument_group("how long, and how many at a time")
    how.add_argument(
        "--trials", type=whole("trials", 1), metavar="N", help="default 20, a grid's all, or what --budget allows"
    )
    how.add_argument("--parallel", type=whole("parallel", 1), default=1, metavar="N", help="at a time, default 1")
    how.add_argument(
        "--budget", dest="budget_s", type=partial(read_time, "budget"), metavar="TIME", help="of the search: 90s, 30m"
    )
    how.add_argument("--prune", metavar="HOW", help="end bad trials early: asha (successive halving) or median")
    seen = parser.add_argument_group("what you get")
    seen.add_argument("--keep", type=whole("keep", 0), default=3, metavar="N", help="best checkpoints, default 3")
    seen.add_argument("--folder", metavar="PATH", help="of all trials, default runs/<script>-tune-<what was asked>")
    seen.add_argument("--json", action="store_true", help="everything as JSON on stdout, instead of the table")
    add_strategy_arguments(parser)
    add_cut_arguments(parser)
    add_server_arguments(parser)
    add_join_arguments(parser)  # each trial has a container of its own there
    add_fault_arguments(parser)
    add_bound_arguments(parser.add_argument_group("when a trial has done enough"))


def execute(options: argparse.Namespace) -> int:
    check_script(options.script, module=options.module)
    space, goal = _space(options), _goal(options)
    sampler = cast(SamplerName, one_of("sampler", options.sampler or "tpe", SAMPLERS))
    prune = cast(PrunerName, one_of("prune", options.prune, PRUNERS)) if options.prune is not None else None
    if prune is not None and options.folds is not None:
        expected = "it looks at what one run tells, and with --folds a trial is several, leave one of them out"
        raise StrategyError("prune", prune, expected)
    if sampler == "grid" and options.seed is not None and options.folds is None:
        raise StrategyError("seed", options.seed, "a grid is the same for every seed, leave it out")
    trials = _count_trials(options, space, sampler)
    given = tuple(options.arguments or ())
    arguments = find_arguments(
        options.script, given, space.names, module=options.module, folds=options.folds is not None
    )
    if not options.module and (told := ScriptText(options.script).never_tells(goal.metric)) is not None:
        raise LaunchError(never_told(goal.metric, told, f"by {goal.flag}"))
    plan = _plan(options)
    if options.parallel > (runs := trials * (options.folds or 1)):
        raise StrategyError("parallel", options.parallel, f"there are {runs} runs to make, give at most that")
    _check_machine(options, plan)
    _check_optuna()
    search = Search(
        script=options.script,
        arguments=arguments,
        command=partial(trial_command, plan, arguments),
        space=space,
        goal=goal,
        sampler=sampler,
        seed=options.seed or 0,
        trials=trials,
        parallel=options.parallel,
        folds=options.folds,
        prune=prune,
        loads=_loaded_once(options, plan),
        **({"budget_s": options.budget_s} if options.budget_s is not None else {}),
    )
    asked = _asked(options, search, plan)
    with _said_if_full(), contextlib.closing(TuneFolder.open(options.folder, options.script, asked)) as folder:
        return TuneCommand(options, search, folder, not_used(plan)).run()


# ── what was typed ───────────────────────────────────────────────────────────────────────────────────────────


def _space(options: argparse.Namespace) -> SearchSpace:
    if not options.param:
        raise InvalidInput("param", None, "say what to try, such as --param lr=log:1e-4..1e-1")
    return SearchSpace.parse(options.param)


def _goal(options: argparse.Namespace) -> Goal:
    if (options.maximize is None) == (options.minimize is None):
        field, value = ("maximize", options.maximize)
        how = (
            "give one of --maximize and --minimize" if value else "say what is looked for, such as --maximize accuracy"
        )
        raise InvalidInput(field, value, how)
    metric = options.maximize if options.maximize is not None else options.minimize
    if not metric.strip() or set(metric) & set("<>="):
        raise InvalidInput("maximize" if options.maximize is not None else "minimize", metric, "name a metric alone")
    return Goal(metric.strip(), maximize=options.maximize is not None)


def _count_trials(options: argparse.Namespace, space: SearchSpace, sampler: str) -> int:
    given: int | None = options.trials
    if given is not None and given > MOST_TRIALS:
        raise InvalidInput("trials", given, f"give at most {MOST_TRIALS}")
    if sampler == "grid":
        size = space.grid_size()
        if size > MOST_TRIALS:
            raise InvalidInput("sampler", sampler, f"this grid has {size} points, give at most {MOST_TRIALS}")
        if given is not None and given > size:
            raise InvalidInput("trials", given, f"this grid has {size} points, give at most that or leave it out")
        return given if given is not None else size
    return given if given is not None else DEFAULT_TRIALS if options.budget_s is None else MOST_TRIALS


def _plan(options: argparse.Namespace) -> RunPlan:
    """How each trial is trained."""
    own = {name: value for name, value in vars(options).items() if name not in _OWN}
    plan = resolve(argparse.Namespace(**own))
    check(plan)
    return plan


def _loaded_once(options: argparse.Namespace, plan: RunPlan) -> list[str]:
    """Returns what is loaded once for all trials; nothing where each is to begin as a new Python."""
    if options.module or wants_plain_torch() or not pays_for(options.script):
        return []
    return modules_of(plan.strategy)


def trial_command(plan: RunPlan, arguments: ScriptArguments, trial: TrialPlace) -> list[str]:
    """What `paceline` is given to make that trial by this plan, but for its run folder."""
    plan = replace(plan, arguments=arguments.of(trial))
    if plan.join is not None:
        name = _container(trial)
        plan = replace(plan, container=name, given={**plan.given, "container": name})
    return plan.command()


def _container(trial: TrialPlace) -> str:
    """Its own on joined servers, the same whenever it is started again: the search's name and the trial's."""
    folder = Path(trial.folder)
    search = folder.parent if trial.fold is None else folder.parent.parent
    name = "-".join([search.name, identity_of(search), *folder.relative_to(search).parts])
    return name[-MOST_NAME:].lstrip(".")


def _check_machine(options: argparse.Namespace, plan: RunPlan) -> None:
    cores, processes = len(allowed_cores()), plan.strategy.processes
    check_memory(options.parallel * processes, options.parallel * plan.strategy.server_processes)
    if options.parallel > cores:
        complain(f"parallel is {options.parallel} and there are {cores} cores: trials share them, each takes longer")


def _check_optuna() -> None:
    if importlib.util.find_spec("optuna") is None:
        raise LaunchError("paceline tune needs optuna, which is not installed: pip install 'paceline[tune]' brings it")


def _asked(options: argparse.Namespace, search: Search, plan: RunPlan) -> dict[str, Any]:
    """What results depend on: with anything else of it changed they are another search's."""
    return {
        "script": options.script,
        "text of the script": script_digest(options.script),
        "param": options.param,
        search.goal.flag: search.goal.metric,
        "sampler": search.sampler,
        "seed": search.seed,
        "folds": search.folds,
        "prune": search.prune,
        "flags": plan.flags(),
        "arguments": list(options.arguments or ()),
    }


@contextlib.contextmanager
def _said_if_full() -> Iterator[None]:
    """A search needs its files: without room for them it ends, with a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        expected = "what has ended is kept; make room, and the same command goes on where it was"
        raise LaunchError(f"the files of the search cannot be written ({error.strerror}): {expected}") from error


# ── doing it ─────────────────────────────────────────────────────────────────────────────────────────────────


class TuneCommand:
    """One search, shown while it goes on, and what came of it."""

    def __init__(self, options: argparse.Namespace, search: Search, folder: TuneFolder, ignored: str = "") -> None:
        """`ignored`: which flags change nothing in a trial, in words."""
        self._options, self._search, self._folder, self._ignored = options, search, folder, ignored
        self._live: Live | None = None
        self._shown_at = 0.0
        self._tuner = Tuner(search, folder, self)

    def run(self) -> int:
        """Make the trials and report; the exit code."""
        search, code = self._search, 0
        before = len(self._folder.begun())
        count = f"up to {search.trials} trials" if search.trials > 1 else "one trial"
        most = count if search.trials < MOST_TRIALS else "trials until the time is used up"
        kept = f"; of an earlier start there are {before}" if before else ""
        self.say(f"{most}, {search.parallel} at a time, for the {search.goal}, in {self._folder.path}{kept}")
        if self._ignored:
            self.say(self._ignored)
        try:
            if can_plot():  # what the picture in the end needs takes a while to load: trials run meanwhile
                threading.Thread(target=load_drawing, name="paceline-drawing").start()
            with stop_is_interrupt(), self._shown():
                self._tuner.run()
        except KeyboardInterrupt:
            code = INTERRUPTED
            self.say("stopped: this is what was found before")
        self._report()
        if code or self._tuner.stopped_by:
            why = "--budget is used up, with more of it" if self._tuner.stopped_by else ""
            self.say(f"{f'{why} ' if why else ''}the same command goes on where it was")
        if code == 0 and not any(record.end == "done" for record in self._tuner.records.values()):
            return 1
        return code

    # ── while it goes on ─────────────────────────────────────────────────────────────────────────────────

    def _shown(self) -> Any:
        """A table that stays on a terminal; elsewhere nothing is drawn."""
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True, highlight=False)
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        return self._live if self._live is not None else contextlib.nullcontext()

    def say(self, line: str) -> None:
        if self._live is not None and self._live.is_started:
            self._live.console.print(f"paceline: {line}", markup=False)
        else:
            print(f"paceline: {line}", file=sys.stderr, flush=True)

    def ended(self, record: TrialRecord) -> None:
        self._shown_at = 0.0
        self.show(self._tuner)
        names = self._search.space.names
        values = ", ".join(f"{name} {shown(record.values[name])}" for name in names)
        if record.end == "failed":
            self.say(f"trial {record.number} failed ({values}):\n{record.error}")
            return
        early = " when it was ended early" if record.end == "pruned" else ""
        best = next((one for one in self._tuner.ranked if one.end == "done"), None)
        beside = f"; the best is trial {best.number} with {shown(best.metric)}" if best not in (None, record) else ""
        what = f"{self._search.goal.metric} {shown(record.metric)}{early}"
        self.say(f"trial {record.number}: {what} ({values}) after {record.seconds:.1f} s{beside if best else ''}")

    def show(self, tuner: Tuner) -> None:
        now = time.monotonic()
        if self._live is None or not self._live.is_started or now < self._shown_at + SHOW_EVERY_S:
            return
        self._shown_at = now
        height = max(3, self._live.console.height - self._search.parallel - 8)
        table = draw(tuner.ranked, tuner.running, self._search.space.names, self._search.goal, height)
        table.caption = f"{len(tuner.records)} of {self._search.trials} trials, {clock(tuner.seconds)}"
        self._live.update(table, refresh=True)

    # ── what came of it ──────────────────────────────────────────────────────────────────────────────────

    def _report(self) -> None:
        ranked, names, goal = self._tuner.ranked, self._search.space.names, self._search.goal
        if not ranked:
            return
        kept = keep_best(self._folder.path, ranked, self._options.keep)
        picture = plot(ranked, self._search.space, goal, self._folder.path) if can_plot() else None
        data = msgspec.json.encode(self._as_data(ranked, kept, picture))
        self._folder.write("leaderboard.json", msgspec.json.format(data))
        self._folder.write("leaderboard.md", as_markdown(ranked, names, goal).encode())
        if self._options.json:
            print(data.decode())
        else:
            self._print(ranked)
        self.say(self._where(ranked, kept, picture))

    def _where(self, ranked: Sequence[TrialRecord], kept: Sequence[Path], picture: Path | None) -> str:
        words = [f"all of it is in {self._folder.path}"]
        words.append(f"the plot in {picture.name}" if picture is not None else MISSING if not can_plot() else "no plot")
        if kept:
            words.append(f"the best checkpoints in {TOP}/")
        elif self._options.keep and any(record.end == "done" for record in ranked):
            words.append("no checkpoints: no script has saved one into pl.trial().folder, or {folder} of its arguments")
        return "; ".join([*words, f"optuna-dashboard {self._folder.path / JOURNAL} shows it"])

    def _print(self, ranked: Sequence[TrialRecord]) -> None:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else NOT_A_TERMINAL, highlight=False)
        console.print(draw(ranked, [], self._search.space.names, self._search.goal, len(ranked)))

    def _as_data(self, ranked: Sequence[TrialRecord], kept: Sequence[Path], picture: Path | None) -> dict[str, Any]:
        search = self._search
        return {
            "script": search.script,
            "metric": search.goal.metric,
            "maximize": search.goal.maximize,
            "sampler": search.sampler,
            "seed": search.seed,
            "folds": search.folds,
            "prune": search.prune,
            "seconds": round(self._tuner.seconds, 3),
            "stopped_by": self._tuner.stopped_by,
            "folder": str(self._folder.path),
            "plot": str(picture) if picture is not None else None,
            "top": [str(path) for path in kept],
            "trials": ranked,
        }
