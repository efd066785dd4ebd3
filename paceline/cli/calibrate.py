"""`paceline calibrate`: measure once what exchanges, memory and busy cores cost on this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from paceline.cli import whole
from paceline.errors import InvalidInput
from paceline.plan.calibrate import calibrate
from paceline.plan.calibration import Calibration, default_path, made_up, read, write

EXAMPLES = """\
examples:
  paceline calibrate                              about two minutes; leave the machine alone meanwhile
  paceline calibrate --show                       what is known of this machine
  paceline calibrate --cores 16 --memory 64 --out big.json
                                                  a machine that is not here: the costs of this one, with more cores
  paceline plan train.py --calibration big.json --hosts 8 --link 10gbit

The file is JSON with a name for every figure: read it, edit it. Runs of scripts that were planned add to it what they
show (`learned`); calibrating anew forgets that.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "paceline calibrate [flags]"
    parser.description = "Measure this machine once, so that plans can be made for it."
    parser.epilog = EXAMPLES
    parser.add_argument("--out", metavar="FILE", help="where to write, default the user's cache folder")
    parser.add_argument("--show", action="store_true", help="show what is known, and measure nothing")
    parser.add_argument("--cores", type=whole("cores", 1), metavar="N", help="make up a machine of so many cores")
    parser.add_argument("--memory", type=whole("memory", 1), metavar="GIB", help="of the machine that is made up")
    parser.add_argument("--json", action="store_true", help="the calibration as JSON on stdout")


def execute(options: argparse.Namespace) -> int:
    path = Path(options.out) if options.out else default_path()
    if options.memory and not options.cores:
        raise InvalidInput("memory", options.memory, "it belongs to a machine that is made up, give --cores too")
    if options.show:
        found = read(path)
    elif options.cores:
        like = read(default_path())
        memory = options.memory * 2**30 if options.memory else like.memory_bytes * options.cores // like.cores
        if not options.out:
            raise InvalidInput(
                "cores", options.cores, "what is made up does not replace what was measured, give --out FILE"
            )
        found = made_up(options.cores, memory, like)
        write(found, path)
    else:
        found = _measure()
        write(found, path)
    if options.json:
        print(msgspec.json.encode(found).decode())
    else:
        print(in_words(found))
        if found.disturbed:
            print(f"paceline: {found.disturbed}")
        print(f"paceline: {'read from' if options.show else 'written to'} {path}")
    return 0


def _measure() -> Calibration:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("calibrating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=None)

        def show(what: str, done: int, count: int) -> None:
            progress.update(task, description=what, completed=done, total=count)

        return calibrate(show, note=lambda line: console.print(f"paceline: {line}", markup=False, highlight=False))


def in_words(found: Calibration) -> str:
    """Returns a calibration as a person reads it."""
    lines = [
        f"{found.machine}, {found.made}" + (f", in {found.seconds:.0f} s" if found.seconds else ""),
        f"memory: one core {found.memory_bandwidth / 1e9:.1f} GB/s, all {found.cores} together "
        f"{found.memory_bandwidth_all / 1e9:.1f}",
        f"beside busy cores: computing takes {found.neighbour_compute:.2f}×, moving memory "
        f"{found.neighbour_memory:.2f}×",
        "",
        "beyond computing, ms a step      " + "".join(f"{_size(size):>12}" for size in _sizes(found)),
    ]
    for curve in found.curves:
        plain = {point.bytes: point for point in curve.points if point.tensors < 64 and not point.norms}
        servers = f", {curve.servers} server{'s' if curve.servers > 1 else ''}" if curve.servers else ""
        name = f"{curve.exchange}, {curve.replicas}{servers}" + (f", {curve.wire}" if curve.wire != "fp32" else "")
        figures = "".join(f"{1000 * plain[size].seconds:12.2f}" for size in _sizes(found) if size in plain)
        lines.append(f"  {name:31}{figures}")
    for family, factor in found.learned.items():
        lines.append(
            f"learned from {factor.runs} runs: {family}, measured over predicted {2.718281828**factor.mean_log:.2f}"
        )
    return "\n".join(lines)


def _sizes(found: Calibration) -> list[int]:
    return sorted({p.bytes for curve in found.curves for p in curve.points if p.tensors < 64 and not p.norms})


def _size(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.0f} KiB"
