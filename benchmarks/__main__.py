"""`python -m benchmarks`: measure, write the figures into docs/, and print which bars were reached."""

from __future__ import annotations

import argparse
import difflib
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.load import OtherLoad
from benchmarks.measure import Result, Setting, Skipped
from benchmarks.processes import Failed
from paceline.errors import InvalidInput

SUITE = (
    "mlp",
    "conv",
    "compute",
    "allreduce",
    "memory",
    "hosts",
    "converge",
    "every",
    "spread_servers",
    "start",
    "servers",
    "straggler",
    "staleness",
    "sparse",
    "replicas",
    "durability",
    "layout",
    "wavefront",
    "stages",
    "predict",
    "serving",
    "served_cuts",
    "overload",
    "quantize",
    "tiles",
    "published",
    "trials",
    "trial_starts",
)
DOCS = Path(__file__).parent.parent / "docs"
LEAST_ROUNDS = 3

DESCRIPTION = """\
Measure Paceline beside DistributedDataParallel on Gloo and beside one process: all in one run, taking turns, pinned
alike. Figures go to docs/benchmarks.md, every round to docs/benchmarks.json, the ratios to docs/benchmarks.png.
Leave the machine alone meanwhile: whatever else runs is in the figures.
"""
EXAMPLES = """\
examples:
  python -m benchmarks                     everything, about half an hour (this is `make bench`)
  python -m benchmarks mlp allreduce       these two; the figures of the others stay as they are
  python -m benchmarks conv --rounds 9     more rounds, a smaller spread
  python -m benchmarks --quick             small sizes and one round: does it run at all? writes nothing
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    console = Console(highlight=False)
    try:
        names = _check(options)
    except InvalidInput as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    results, problems = _measure(names, options, console)
    if results:
        _print_table(results, options, console)
    for problem in problems:
        console.print(problem, markup=False)
    return 1 if any(problem.startswith("failed") for problem in problems) else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = "\n".join(f"  {name:15}{_about(name)}" for name in SUITE)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=DESCRIPTION,
        epilog=f"benchmarks:\n{about}\n\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which to run, default all")
    parser.add_argument("--quick", action="store_true", help="small sizes: a look, not a measurement")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"turns of each contestant, default {LEAST_ROUNDS}")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where to write, default docs/; nowhere with --quick"
    )
    return parser.parse_args(arguments)


def _check(options: argparse.Namespace) -> list[str]:
    """Fill in what was left to its default; the names to run, in the suite's order."""
    for name in options.names:
        if name not in SUITE:
            near = difflib.get_close_matches(name, SUITE, n=1)
            raise InvalidInput(
                "benchmark", name, f"did you mean {near[0]}?" if near else f"give one of {', '.join(SUITE)}"
            )
    least = 1 if options.quick else LEAST_ROUNDS
    if options.rounds is None:
        options.rounds = least
    if options.rounds < least:
        raise InvalidInput("rounds", options.rounds, f"give {least} or more{'' if options.quick else ', or --quick'}")
    if options.out is None and not options.quick:
        options.out = DOCS
    if options.out is not None and not options.out.is_dir():
        raise InvalidInput("out", str(options.out), "there is no such folder, make it first")
    return [name for name in SUITE if not options.names or name in options.names]


def _measure(
    names: Sequence[str], options: argparse.Namespace, console: Console
) -> tuple[dict[str, Result], list[str]]:
    results: dict[str, Result] = {}
    problems: list[str] = []
    for name in names:
        benchmark = _load(name)
        console.rule(f"{name}: {benchmark.TITLE}", align="left")
        setting = Setting(
            "quick" if options.quick else "full", options.rounds, lambda line: console.print(line, markup=False)
        )
        load = OtherLoad()
        try:
            found: Result = benchmark.run(setting)
            if note := load.note():
                problems.append(f"disturbed {name}: {note}")
                found = msgspec.structs.replace(found, notes=(*found.notes, note))
            results[name] = found
            if options.out is not None:
                _write({name: found}, options.out, console)  # at once: what follows may fail, or be stopped
        except Skipped as reason:
            problems.append(f"skipped {name}: {reason}")
        except Failed as reason:
            problems.append(f"failed {name}: {reason}")
    return results, problems


def _print_table(results: dict[str, Result], options: argparse.Namespace, console: Console) -> None:
    title = "quick: small sizes, the bars do not apply" if options.quick else "ratios, median (lowest – highest)"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("what", "bar", "measured", ""):
        table.add_column(heading, overflow="fold")
    words = {True: "[blue]reached", False: "[bold yellow]not reached", None: ""}
    for result in results.values():
        for claim in result.claims:
            table.add_row(claim.text, claim.bar, claim.figure, "" if options.quick else words[claim.reached])
        table.add_section()
    console.print(table)


def _write(results: dict[str, Result], folder: Path, console: Console) -> None:
    # These import torch and matplotlib, for which `--help` does not wait.
    from benchmarks import report
    from benchmarks.machine import this_machine
    from benchmarks.plot import draw, draw_curves

    machine = this_machine()
    before = report.read(folder) or report.Report({})
    now = before.with_new(results, machine, SUITE)
    everything = [claim for measured in now.results.values() for claim in measured.result.claims]
    claims = [claim for claim in everything if claim.bar] or everything  # the page has the others
    pictures = [folder / "benchmarks.png"]
    draw(claims, pictures[0])
    for name, measured in now.results.items():
        if measured.result.plot is not None:
            pictures.append(folder / report.picture(name))
            draw_curves(measured.result.plot, pictures[-1], measured.result.title)
    for path in [*report.write(now, folder), *pictures]:
        console.print(f"wrote {path}", markup=False)


def _load(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


def _about(name: str) -> str:
    """The first line of the benchmark's docstring, without loading what it imports."""
    source = (Path(__file__).parent / f"{name}.py").read_text()
    return source.split('"""')[1].splitlines()[0]


if __name__ == "__main__":
    # Also when it is told to end, it has to end what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
