"""The flags of all scripts that push a gradient to a server and pull parameters, again and again.

A step is both, in whatever order. The gradient costs nothing: it is the same tensor of ones each time. The server
applies plain SGD, so after n steps of all replicas together every parameter is -n * LR, which each script checks:
what is fast because it is not done is no use. Every peer's Python imports this, so it needs neither numpy nor torch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

LR = 2.0**-10  # so that thousands of steps add up exactly


def parse(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=40_000_000, help="of all parameters")
    parser.add_argument("--steps", type=int, default=20, help="of each replica")
    parser.add_argument("--times", type=Path, help="write down when each step ended, a file a replica")
    return parser


def times_of(options: argparse.Namespace, replica: int) -> Path | None:
    times: Path | None = options.times
    return times.with_name(f"{times.name}.{replica}") if times is not None else None


def meet(options: argparse.Namespace, replica: int, replicas: int) -> None:
    """Wait until all replicas are there: otherwise the first would make the steps of those that start later."""
    if options.times is None:
        return
    folder = options.times.parent
    (folder / f"ready.{replica}").touch()
    while not all((folder / f"ready.{number}").exists() for number in range(replicas)):
        time.sleep(0.001)


def check(found: float, steps: int) -> None:
    assert found == -steps * LR, f"after {steps} steps the parameters are {found} and not {-steps * LR}"
