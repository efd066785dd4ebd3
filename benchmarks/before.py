"""`python -m benchmarks.before REVISION`: this tree and an earlier one, in turns, on the benchmarks of both.

A change that should cost nothing is shown here to cost nothing. Each tree has a process that knows its own benchmarks
and its own Paceline, and is asked for one figure at a time: old, new, new, old …, so that neither is always the one who
comes second. Peers are left out: they are the same in both.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.load import OtherLoad

HERE = Path(__file__).parent.parent
NAMES = ("mlp", "conv", "allreduce", "servers", "sparse", "layout", "tiles")
OURS = ("Paceline", "--tiles")
LEAST = 0.97


class Contestants(Exception):
    """What a benchmark would have run, caught before it does."""

    def __init__(self, runs: Mapping[str, Callable[[], Any]], show: Callable[[Any], str]) -> None:
        self.runs, self.show = runs, show


class Tree:
    """The process of one tree."""

    def __init__(self, folder: Path, names: Sequence[str], scale: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        # This file, not the tree's own: the old one may not have it.
        command = [sys.executable, __file__, "--answer", scale, *names]
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.contestants: dict[str, str] = self._said()

    def figure(self, name: str) -> float:
        """Run `name` once."""
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        return float(self._said())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _said(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"benchmarks.before: a tree's process has ended with {self._process.wait()}")
        return json.loads(line)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if options.answer:
        return _answer(options.revision, options.names)
    console = Console(highlight=False)
    names = options.names or NAMES
    load = OtherLoad()
    with _checked_out(options.revision) as before:
        scale = "quick" if options.quick else "full"
        old, new = Tree(before, names, scale), Tree(HERE, names, scale)
        wanted = [name for name in new.contestants if name in old.contestants and options.only in name]
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in wanted}
        for turn in range(options.rounds):
            for name, given in figures.items():
                order = (old, new) if turn % 2 == 0 else (new, old)
                found = {tree: tree.figure(name) for tree in order}
                given.append((found[old], found[new]))
                console.print(f"round {turn + 1}/{options.rounds}  {name}: {found[old]:.4g}, {found[new]:.4g}")
        old.close()
        new.close()
    table = Table(title=f"speed of this tree over {options.revision}", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in ("what", "unit", "old", "new", "median (lowest – highest)", "best over best", f"≥ {LEAST}"):
        table.add_column(heading, overflow="fold")
    for name, given in figures.items():
        table.add_row(name, *_row(new.contestants[name], given))
    console.print(table)
    if note := load.note():
        console.print(note)
    return 0


def _row(unit: str, given: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    rate = "/s" in unit
    ratios = [after / before if rate else before / after for before, after in given]
    best = max if rate else min
    ends = [best(column) for column in zip(*given, strict=True)]
    middle = statistics.median(ratios)
    return (
        unit,
        *(f"{statistics.median(column):.4g}" for column in zip(*given, strict=True)),
        f"{middle:.3f} ({min(ratios):.2f} – {max(ratios):.2f})",
        f"{ends[1] / ends[0] if rate else ends[0] / ends[1]:.3f}",
        "yes" if middle >= LEAST else "no",
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.before", description=__doc__)
    parser.add_argument("revision", help="what git calls the earlier tree")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"benchmarks, default {' '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each, default 5")
    parser.add_argument("--quick", action="store_true", help="small sizes: a look, not a measurement")
    parser.add_argument("--only", default="", metavar="TEXT", help="of these, what has this in its name")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


@contextlib.contextmanager
def _checked_out(revision: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="paceline-before-") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


# ── a tree's process ─────────────────────────────────────────────────────────────────────────────────────────


def _answer(scale: str, names: Sequence[str]) -> int:
    """Say what this tree's benchmarks run, then run what is asked for, a line each."""
    from benchmarks import measure

    def catch(runs: Mapping[str, Callable[[], Any]], setting: object, show: Callable[[Any], str]) -> None:
        raise Contestants(runs, show)

    measure.take_turns = catch  # type: ignore[assignment]
    known: dict[str, Callable[[], Any]] = {}
    units: dict[str, str] = {}
    for name in names:
        try:
            importlib.import_module(f"benchmarks.{name}").run(measure.Setting(scale, 1, lambda line: None))
        except Contestants as caught:
            for contestant, start in caught.runs.items():
                if any(ours in contestant for ours in OURS):
                    known[f"{name}: {contestant}"] = start
                    units[f"{name}: {contestant}"] = "steps/s" if "/s" in _shown(caught.show) else "ms"
    print(json.dumps(units), flush=True)
    for line in sys.stdin:
        given = known[line.strip()]()
        print(json.dumps(given if isinstance(given, float) else given.ms), flush=True)
    return 0


def _shown(show: Callable[[Any], str]) -> str:
    try:
        return show(1.0)
    except AttributeError:  # several figures, times first
        return "ms"


if __name__ == "__main__":
    # Also when it is told to end, it takes its tree away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
