"""`paceline dims`: the named dims of a script's model, so that a user can pick one and write a layout."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline.cli.checks import check_script
from paceline.errors import LaunchError
from paceline.launch.job import run_alone
from paceline.run_place import Place

EXAMPLES = """\
examples:
  paceline dims train.py
  paceline dims train.py --json | jq .dims

The script runs until its first batch reaches the model, in one process, and ends there: nothing is trained. Dims that
are the same have one name; names that you like better go into Trainer(dims={"blocks.*.fc1.weight": "hidden embed"}).
Then, for example:
  paceline run train.py --mesh model=2 --layout hidden=model
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline dims SCRIPT [--json] [-- the script's own arguments]"
    parser.description = "Show every parameter of the model with the names of its dims."
    parser.epilog = EXAMPLES
    parser.add_argument("script", metavar="SCRIPT", help="a Python file that uses pl.Trainer")
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def execute(options: argparse.Namespace) -> int:
    check_script(options.script)
    found = _run(options.script, options.arguments or [])
    print(json.dumps(found) if options.json else _table(found))
    return 0


def _run(script: str, arguments: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="paceline-dims-") as scratch:
        path = Path(scratch) / "dims.json"
        outcome = run_alone([script, *arguments], Place(row=0, rows=1, dims_to=str(path), started_by="reference"))
        if path.exists():
            found: dict[str, Any] = json.loads(path.read_text())
            return found
        sys.stderr.write(outcome.stderr)
    if outcome.returncode:
        raise LaunchError(f"{script} ended with exit code {outcome.returncode} before a batch reached the model")
    raise LaunchError(f"{script} ended and no batch reached the model: it must call trainer.step or trainer.evaluate")


def _table(found: dict[str, Any]) -> str:
    rows = [(row["parameter"], "×".join(map(str, row["shape"])), row["dims"]) for row in found["parameters"]]
    widths = [max(len(row[column]) for row in (*rows, ("parameter", "shape", ""))) for column in (0, 1)]
    lines = [f"{'parameter':{widths[0]}}  {'shape':{widths[1]}}  dims"]
    lines += [f"{name:{widths[0]}}  {shape:{widths[1]}}  {dims}" for name, shape, dims in rows]
    lines += ["", "dim, its size, and how much of the model lies along it"]
    width = max(map(len, found["dims"]), default=0)
    for dim, entry in found["dims"].items():
        share = entry["parameters"] / max(1, found["elements"])
        lines.append(f"  {dim:{width}}  {', '.join(map(str, entry['sizes'])):>8}  {share:.0%}")
    return "\n".join(lines)
