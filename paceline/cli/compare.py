"""`paceline compare`: the same training in several ways, to a target, several times over.

Every strategy is resolved to the plan that `paceline run` would have, and all of them are looked at before the first
run is started. Then the runs are made one after the other, a repeat of each strategy before the next repeat of any, so
that whatever the machine does meanwhile, it does to all of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from paceline.cli import Parser, run_flags, whole
from paceline.cli.checks import check, check_script
from paceline.cli.run_plan import RunPlan, resolve
from paceline.compare import table
from paceline.compare.answers import answer_all, in_words
from paceline.compare.folder import CompareFolder
from paceline.compare.measuring import Measurement, measure
from paceline.compare.plot import MISSING, can_plot, plot
from paceline.compare.seeds import Seeds, find_seeds
from paceline.compare.summary import WaySummary, summarize
from paceline.compare.ways import Defaults, Way, read_ways
from paceline.errors import LaunchError, PacelineError, StrategyError
from paceline.launch.cores import allowed_cores
from paceline.launch.emulate import Emulation
from paceline.launch.signals import stop_is_interrupt
from paceline.run_place import INTERRUPTED
from paceline.slow_replicas import parse_slow
from paceline.watch.display import clock
from paceline.watch.kept_folder import script_digest
from paceline.watch.target import Target, read_time

EXAMPLES = """\
strategies, separated by commas; xN behind one is its number of replicas:
  one                  a single replica
  mirrored             replicas that hold the parameters together
  sync, accept K       parameters on servers, updated when all replicas have reported, or the first K
  async, bounded K     updated at each report; at most K steps ahead of the slowest
  layout DIM[=N]       the model cut along a dim (paceline dims), over N devices; heads+hidden for several
  stages [N], tiles [N|RxC], wavefront [N]    cut by layer, by image region, by recurrent layer and time

the script has to tell the metric, once an epoch say:
  trainer.evaluate(test_set, accuracy, name="accuracy")      or  trainer.log(accuracy=0.93)

examples:
  paceline compare train.py --until "accuracy>=0.97" --strategies "async, sync, mirrored, layout hidden, one"
  paceline compare train.py --until "loss<=0.1" --strategies "sync, accept 3, async" --replicas 4 --slow 2:5x
                                                 with a straggler: replica 2 takes five times as long
  paceline compare train.py --until "accuracy>=0.97" --strategies "mirrored, one" --emulate hosts=2,link=100mbit
  paceline compare train.py --until "accuracy>=0.97" --strategies "sync, async" -- --lr 0.1 --seed {seed}
                                                 {seed} is 0, 1, … in the repeats, the same for every strategy
stopped or killed, the same command with --folder goes on where it was.
"""


NOT_A_TERMINAL = 120  # letters a line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = 'paceline compare SCRIPT --until TARGET --strategies "…" [flags] [-- the script\'s own arguments]'
    parser.description = "Train a script to a target in several ways: how long each takes, and whether it matters."
    parser.epilog = EXAMPLES
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that uses pl.Trainer")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as with python -m")
    what = parser.add_argument_group("what is compared")
    what.add_argument("--until", metavar="TARGET", required=True, help='such as "accuracy>=0.97" or "loss<0.1"')
    what.add_argument("--strategies", metavar="LIST", required=True, help="see below")
    what.add_argument("--repeats", type=whole("repeats", 1), default=3, metavar="N", help="of each, default 3")
    what.add_argument(
        "--replicas", type=whole("replicas", 1), metavar="N", help="of each that has some, default a core"
    )
    what.add_argument("--servers", type=whole("servers", 1), default=1, metavar="N", help="default 1")
    what.add_argument("--devices", type=whole("devices", 2), default=2, metavar="N", help="of a cut model, default 2")
    what.add_argument("--wire", metavar="FORMAT", help="of gradients between hosts, as `paceline run` takes it")
    what.add_argument("--emulate", metavar="hosts=2,link=1gbit", help="several machines on this one (root)")
    what.add_argument("--slow", metavar="2:5x", help="a straggler: replica 2 takes 5 times as long a step")
    stop = parser.add_argument_group("when a run ends that does not reach the target")
    stop.add_argument(
        "--longest", dest="longest_s", type=partial(read_time, "longest"), metavar="TIME", help="of training: 60s, 5m"
    )
    stop.add_argument("--most-steps", type=whole("most-steps", 1), metavar="N", help="updates")
    stop.add_argument("--to-end", action="store_true", help="let those that reach it finish too, to compare results")
    seen = parser.add_argument_group("what you get")
    seen.add_argument("--folder", metavar="PATH", help="of all runs, default runs/<date-time>-<script>-compare")
    seen.add_argument("--json", action="store_true", help="everything as JSON on stdout, instead of the table")


@dataclass(frozen=True)
class Contender:
    """A way, the plan behind it, and what of the flags it has no use for."""

    way: Way
    plan: RunPlan
    note: str = ""


def execute(options: argparse.Namespace) -> int:
    check_script(options.script, module=options.module)
    target = Target.parse(options.until)
    arguments = tuple(options.arguments or ())
    seeds = find_seeds(options.script, arguments, module=options.module)
    contenders = _contenders(options, target)
    asked = {name: value for name, value in vars(options).items() if name not in ("folder", "json")}
    asked["text of the script"] = script_digest(options.script)
    folder = CompareFolder.open(options.folder, options.script, asked)
    comparison = Comparison(options, target, seeds, contenders, folder)
    return comparison.run()


def _contenders(options: argparse.Namespace, target: Target) -> list[Contender]:
    """Every strategy as the plan that it would be; a sentence for the first that is none."""
    replicas = options.replicas or max(2, len(allowed_cores()))
    ways = read_ways(options.strategies, Defaults(replicas, options.servers, options.devices))
    if options.slow is not None:
        parse_slow(options.slow, max(way.replicas for way in ways))
    if options.emulate is not None:
        Emulation.parse(options.emulate)  # all its hosts are there from the start
    contenders = []
    for way in ways:
        flags, notes = list(way.flags), []
        if options.slow is not None:
            try:
                parse_slow(options.slow, way.replicas)
                flags += ["--slow", options.slow]
            except StrategyError:
                notes.append("without the straggler, it has no such replica")
        if options.emulate is not None:
            if way.kind == "one" or (way.is_cut and way.replicas == 1):
                notes.append("on one host, without the link")
            else:
                flags += ["--emulate", options.emulate]
        flags += ["--wire", options.wire] if options.wire is not None else []
        flags += ["--until", str(target), *(["--goes-on"] if options.to_end else [])]
        flags.append("--no-checkpoints")  # each begins anew, whatever the one before has saved
        flags += ["--longest", str(options.longest_s)] if options.longest_s is not None else []
        flags += ["--most-steps", str(options.most_steps)] if options.most_steps is not None else []
        contenders.append(Contender(way, _plan(options, way, flags), "; ".join(notes)))
    return contenders


def _plan(options: argparse.Namespace, way: Way, flags: Sequence[str]) -> RunPlan:
    parser = Parser("paceline run")
    run_flags.add_arguments(parser)
    try:
        parsed = parser.parse([options.script, *(["-m"] if options.module else []), *flags])
        parsed.arguments = options.arguments
        plan = resolve(parsed)
        check(plan)
    except PacelineError as error:
        raise StrategyError("strategies", way.name, f"its {error}") from error
    return plan


class Comparison:
    """The runs of all contenders, and what is made of them."""

    def __init__(
        self,
        options: argparse.Namespace,
        target: Target,
        seeds: Seeds,
        contenders: Sequence[Contender],
        folder: CompareFolder,
    ) -> None:
        self._options, self._target, self._seeds, self._folder = options, target, seeds, folder
        self._contenders = contenders
        self._measurements: list[Measurement] = []

    def run(self) -> int:
        """Make all runs, and show what came of them; the exit code."""
        for line in self._what_is_done():
            _say(line)
        code = 0
        try:
            with stop_is_interrupt():
                self._measure_all()
        except KeyboardInterrupt:
            code = INTERRUPTED
            _say("stopped: this is what was measured before")
        self._report()
        if code:
            _say(f"the same command with --folder {self._folder.path} goes on")
        return code or (1 if any(one.error is not None for one in self._measurements) else 0)

    def _what_is_done(self) -> Iterator[str]:
        ways, repeats = len(self._contenders), self._options.repeats
        runs = f"{_count(ways, 'strategy')}, {_count(repeats, 'repeat')}: {_count(ways * repeats, 'run')}"
        yield f"{runs}; {self._seeds.words}"
        for contender in self._contenders:
            if contender.note:
                yield f"{contender.way.name}: {contender.note}"

    def _measure_all(self) -> None:
        plans = [(contender, repeat) for repeat in range(self._options.repeats) for contender in self._contenders]
        failed: set[str] = set()
        took: list[float] = []
        with _Progress(len(plans)) as progress:
            for number, (contender, repeat) in enumerate(plans):
                name = contender.way.name
                if name in failed:
                    continue
                kept = self._folder.read(contender.way, repeat)
                began = time.monotonic()
                look = partial(progress.show, number, f"{name}, repeat {repeat + 1}", took)
                one = kept or self._measure(contender, repeat, look)
                self._measurements.append(one)
                if one.error is not None:
                    failed.add(name)
                if kept is None:
                    took.append(time.monotonic() - began)
                progress.done(
                    number, f"{name}, repeat {repeat + 1}: {_result(one, self._target)}", kept=kept is not None
                )

    def _measure(self, contender: Contender, repeat: int, look: Callable[[str], None]) -> Measurement:
        way, path = contender.way, self._folder.clear(contender.way, repeat)
        own: dict[str, Any] = {"run_folder": str(path), "quiet": True}
        plan = replace(contender.plan, arguments=self._seeds.of(repeat), **own, given={**contender.plan.given, **own})
        one = measure(way.name, repeat, plan.command(), path, self._target, look)
        if one.error is None and one.best is None and not any(earlier.curve for earlier in self._measurements):
            self._refuse(one)
        if one.error is None:  # one that failed is tried again
            self._folder.keep(way, one)
        return one

    def _refuse(self, one: Measurement) -> None:
        """The script cannot be compared: what is missing in it."""
        script = self._options.script
        if one.updates == 0:
            raise LaunchError(
                f"{script} made no step with a pl.Trainer: add trainer = pl.Trainer(model, optimizer, loss), and "
                "for batch in trainer.batches(dataset, batch_size, epochs=…): trainer.step(batch)"
            )
        raise LaunchError(self._target.never_seen(one.names))

    # ── what came of it ──────────────────────────────────────────────────────────────────────────────────────

    def _report(self) -> None:
        ways = [contender.way for contender in self._contenders]
        summaries = summarize(ways, self._measurements)
        if not summaries:
            return
        to_end = self._options.to_end
        words = in_words(summaries, self._target, to_end=to_end)
        plots = plot(summaries, self._target, self._folder.path) if can_plot() else []
        data = msgspec.json.encode(self._as_data(summaries, words, plots))
        self._folder.write("report.json", msgspec.json.format(data))
        markdown = f"{table.as_markdown(summaries, self._target)}\n\n{words}"
        self._folder.write("report.md", markdown.encode())
        if self._options.json:
            print(data.decode())
        else:
            self._print(summaries, words)
        for summary in summaries:
            if summary.failed is not None and summary.failed.error is not None:
                _say(f"{summary.way.name} failed:\n{summary.failed.error}")
        where = f"all of it is in {self._folder.path}"
        _say(f"{where}, the curves in {plots[0].name} and {plots[1].name}" if plots else f"{where}; {MISSING}")

    def _print(self, summaries: Sequence[WaySummary], words: str) -> None:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else NOT_A_TERMINAL, highlight=False)
        console.print(table.draw(summaries, self._target, console.width))
        console.print(words, markup=False)

    def _as_data(self, summaries: Sequence[WaySummary], words: str, plots: Sequence[Path]) -> dict[str, Any]:
        fields = ("seconds", "wall_seconds", "updates", "samples", "value", "best", "bytes_sent", "late", "dropped")
        notes = {contender.way: contender.note for contender in self._contenders}
        return {
            "script": self._options.script,
            "target": str(self._target),
            "repeats": self._options.repeats,
            "seeds": self._seeds.words,
            "strategies": [
                {
                    "strategy": summary.way.name,
                    "flags": summary.way.flags,
                    "note": notes[summary.way],
                    "reached": len(summary.reached),
                    "runs": len(summary.done),
                    **{
                        name: asdict(found) if (found := summary.over(name)) is not None else None
                        for name in (*fields, "thrown_away", "staleness")
                    },
                }
                for summary in summaries
            ],
            "answers": [asdict(one) for one in answer_all(summaries, self._target, to_end=self._options.to_end)],
            "words": words,
            "folder": str(self._folder.path),
            "plots": [str(path) for path in plots],
            "measurements": self._measurements,
        }


def _result(one: Measurement, target: Target) -> str:
    if one.error is not None:
        return "failed"
    if one.reached:
        return f"{target} after {one.seconds or 0:.2f} s, {one.updates} updates"
    return f"{target} not reached, {f'at best {one.best:.4g}' if one.best is not None else 'never told'}"


def _count(number: int, what: str) -> str:
    """
    >>> _count(1, "repeat"), _count(2, "strategy")
    ('1 repeat', '2 strategies')
    """
    if number != 1:
        what = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{number} {what}"


def _say(line: str) -> None:
    print(f"paceline: {line}", file=sys.stderr, flush=True)


class _Progress:
    """Which run it is, how far that is, and how long the rest will take: a line that stays on a terminal, a line a run
    elsewhere."""

    def __init__(self, runs: int) -> None:
        self._runs = runs
        self._live = sys.stderr.isatty()
        self._began = time.monotonic()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._clear()

    def show(self, number: int, name: str, took: Sequence[float], how_far: str) -> None:
        if self._live:
            left_s = (self._runs - number) * sum(took) / len(took) if took else None
            rest = f", about {clock(left_s)} left" if left_s is not None else ""
            passed = clock(time.monotonic() - self._began)
            sys.stderr.write(f"\r\x1b[K{number + 1}/{self._runs}  {name}: {how_far}  ({passed}{rest})")
            sys.stderr.flush()

    def done(self, number: int, line: str, *, kept: bool) -> None:
        self._clear()
        _say(f"{number + 1}/{self._runs}  {line}{' (measured before)' if kept else ''}")

    def _clear(self) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
