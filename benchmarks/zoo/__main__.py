"""`python -m benchmarks.zoo` (`make zoo`): runs the cells that are missing, keeps them in `docs/zoo.json`, and writes
`docs/zoo.md` of them."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.zoo.cell import LIMIT_S, ROOT, Cell, code_now, run_cell
from benchmarks.zoo.models import MODELS, Model
from benchmarks.zoo.strategies import STRATEGIES, Strategy
from benchmarks.zoo.table import Results, all_pairs, counts, page
from paceline.errors import InvalidInput, PacelineError, nearest_first

EXAMPLES = """\
examples:
  python -m benchmarks.zoo                                        what is missing or of other code
  python -m benchmarks.zoo --kept                                 the same, but what was run with other code stays
  python -m benchmarks.zoo --only gpt2 --strategy stages --show   this cell again, with all that its processes print
  python -m benchmarks.zoo --strategy mirrored,servers            these columns again
  python -m benchmarks.zoo --list                                 what there is
  python -m benchmarks.zoo --write                                the page from what was run, and nothing more

by hand, the script of every cell:
  paceline run benchmarks/zoo/train.py --stages 2 --micro-batches 2 -- gpt2 --no-dropout
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="MODELS", help="run these again, with commas between them")
    parser.add_argument("--strategy", metavar="NAMES", help="run these columns again, with commas between them")
    parser.add_argument("--kept", action="store_true", help="keep cells that were run with other code")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="SECONDS", help=f"of a run, default {LIMIT_S:g}"
    )
    parser.add_argument("--show", action="store_true", help="print what the processes of each cell have printed")
    parser.add_argument("--json", action="store_true", help="print the cells as JSON")
    parser.add_argument("--list", action="store_true", help="list models and strategies")
    parser.add_argument("--write", action="store_true", help="run nothing, write the page")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".zoo" / "results", help="what the runs leave, default .zoo/results"
    )
    parser.add_argument(
        "--cells",
        type=Path,
        default=ROOT / "docs" / "zoo.json",
        metavar="FILE",
        help="where cells are kept, default docs/zoo.json; the page of them stands beside it",
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that what was started is ended
    try:
        return _main(options)
    except PacelineError as error:
        print(error, file=sys.stderr)
        return 2


def _main(options: argparse.Namespace) -> int:
    if options.list:
        print("models: ", ", ".join(MODELS), "\nstrategies: ", ", ".join(STRATEGIES), sep="")
        return 0
    results = Results(options.cells)
    asked = _asked(options)
    chosen = bool(options.only or options.strategy)
    if not options.write:
        kept = {key for key, cell in results.cells.items() if options.kept or cell.code == code_now()}
        todo = asked if chosen else [pair for pair in asked if (pair[0].name, pair[1].name) not in kept]
        _run(todo, results, options)
    found = [results.cells[key] for model, strategy in asked if (key := (model.name, strategy.name)) in results.cells]
    if options.json:
        print(json.dumps([msgspec.to_builtins(cell) for cell in found]))
    else:
        print(", ".join(f"{count} {verdict}" for verdict, count in counts(found).items()))
    options.cells.with_suffix(".md").write_text(page(results.cells))
    return 0


def _asked(options: argparse.Namespace) -> list[tuple[Model, Strategy]]:
    models, strategies = _named("only", options.only, MODELS), _named("strategy", options.strategy, STRATEGIES)
    if not models:
        return [pair for pair in all_pairs() if not strategies or pair[1].name in strategies]
    wanted = [(MODELS[model], STRATEGIES[one]) for model in models for one in strategies or STRATEGIES]
    return [(model, strategy) for model, strategy in wanted if strategy.applies(model)]


def _named(flag: str, given: str | None, known: Sequence[str] | dict[str, object]) -> list[str]:
    names = given.split(",") if given else []
    for name in names:
        if name not in known:
            raise InvalidInput(flag, name, f"give some of {', '.join(nearest_first(name, list(known)))}")
    return names


def _run(todo: Sequence[tuple[Model, Strategy]], results: Results, options: argparse.Namespace) -> None:
    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(todo))
        for model, strategy in todo:
            progress.update(bar, description=f"{model.name}, {strategy.words}")
            cell = run_cell(model, strategy, options.folder, limit_s=options.limit)
            results.add(cell)
            progress.advance(bar)
            line = f"{cell.model:16} {cell.strategy:10} {cell.seconds:6.1f} s  {cell.verdict:10} {cell.words}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            if options.show:
                _show(cell, options.folder, console)


def _show(cell: Cell, folder: Path, console: Console) -> None:
    alone = (folder / "alone").glob(f"{cell.model}-*/*.txt")
    for path in (*alone, *sorted((folder / f"{cell.model}-{cell.strategy}").glob("*.txt"))):
        console.rule(path.relative_to(folder).as_posix())
        console.print(path.read_text(errors="replace"), markup=False, highlight=False, soft_wrap=True)
    console.print(f"by hand: {cell.command}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
