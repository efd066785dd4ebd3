"""`make demo`: what Paceline promises, shown on this machine in about a minute.

1. digits.py is trained by one plain process, and by 2 and 4 mirrored replicas: the same result, side by side.
2. It is trained by 2 replicas once more, and one of them is killed in the middle: still the same result.
3. `paceline verify` compares the first steps, tensor by tensor.

The exit code is 0 only if all of that is so. Each run is a process of its own, as if typed by hand; a stopwatch around
`Trainer.step` is all that is added to digits.py (`_train_with_a_stopwatch`, which runs in those processes).
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

DEMO = Path(__file__).resolve()
DIGITS = DEMO.with_name("digits.py")
PACELINE = [sys.executable, "-c", "import sys; from paceline.cli import main; sys.exit(main())"]
SAME = 1e-4  # parameters are numbers around 0.1; rounding makes differences below 1e-5
LONGEST_RUN_S = 300.0


@dataclass(frozen=True)
class Trained:
    """What one run came to."""

    name: str
    accuracy: float
    loss: float
    seconds: float
    samples_per_s: float
    parameters: dict[str, np.ndarray[Any, Any]]

    def difference(self, other: Trained) -> float:
        """The largest difference of any parameter."""
        mine, theirs = self.parameters, other.parameters
        assert mine.keys() == theirs.keys()
        return max(float(np.abs(mine[name] - theirs[name]).max()) for name in mine)


class Demo:
    """The runs, and what is shown of them."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self._folder = folder
        self._arguments = arguments
        self._console = Console(highlight=False)

    # ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────

    def train(self, name: str, replicas: int | None, *, kill_replica: int | None = None) -> Trained:
        """Train digits.py; `replicas=None` is plain `python digits.py`."""
        folder = self._folder / name.replace(" ", "-")
        folder.mkdir()
        own = ["--stopwatch", str(folder), *self._arguments, "--save", str(folder / "model.safetensors")]
        command = [sys.executable, str(DEMO), *own]
        if replicas is not None:
            flags = ["--replicas", str(replicas), "--run-folder", str(folder / "run"), "--quiet"]
            command = [*PACELINE, "run", str(DEMO), *flags, "--", *own]
        with self._working(name), subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
            if kill_replica is not None:
                _kill_in_the_middle(folder / "run" / "events.jsonl", kill_replica, run)
            _, errors = run.communicate(timeout=LONGEST_RUN_S)
        said = errors.decode(errors="replace").strip()
        if run.returncode:
            raise SystemExit(f"{said}\n{name}: exit code {run.returncode}")
        if kill_replica is not None:
            self._console.print(f"  [dim]{said}[/dim]", soft_wrap=True)
        watched = json.loads((folder / "watched.json").read_text())
        return Trained(name, **watched, parameters=load_file(folder / "model.safetensors"))

    def verify(self) -> bool:
        flags = ["--replicas", "2", "--", *self._arguments]
        self._console.print(f"\n$ paceline verify examples/{DIGITS.name} {' '.join(flags)}")
        with self._working("paceline verify"):
            verdict = subprocess.run([*PACELINE, "verify", str(DIGITS), *flags], text=True, stdout=subprocess.PIPE)
        self._console.print(verdict.stdout.strip(), soft_wrap=True)
        return verdict.returncode == 0

    # ── what is seen ─────────────────────────────────────────────────────────────────────────────────────────

    def table(self, runs: list[Trained]) -> None:
        table = Table(title=f"digits.py {' '.join(self._arguments)}, on {len(os.sched_getaffinity(0))} cores")
        table.add_column("trained by")
        for column in ("accuracy", "last loss", "training", "samples/s", "largest difference"):
            table.add_column(column, justify="right")
        reference = runs[0]
        for run in runs:
            off = "–" if run is reference else f"{run.difference(reference):.1e}"
            cells = (f"{run.accuracy:.4f}", f"{run.loss:.6f}", f"{run.seconds:.2f} s", f"{run.samples_per_s:,.0f}", off)
            table.add_row(run.name, *cells)
        self._console.print(table)
        self._console.print(
            "Largest difference: of any trained parameter to that of one process. Sums in another order round otherwise."
        )

    def close(self, *, agree: bool) -> int:
        self._console.print("\n[green]All results agree.[/green]" if agree else "\n[red]The results differ.[/red]")
        return 0 if agree else 1

    @contextmanager
    def _working(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        with self._console.status(f"{what} …"):
            yield
        self._console.print(f"  {what}: done in {time.monotonic() - began:.1f} s, start of the processes included")


def _kill_in_the_middle(events: Path, replica: int, run: subprocess.Popen[bytes]) -> None:
    """`kill -9` for a replica, as soon as its run reports steps."""
    while run.poll() is None:
        known = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
        if any(event["event"] == "step" for event in known):
            (pid,) = (event["pid"] for event in known if event["event"] == "started" and event["replica"] == replica)
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.02)


# ── inside the processes that train ──────────────────────────────────────────────────────────────────────────────


def _train_with_a_stopwatch(folder: Path, arguments: list[str]) -> None:
    """Run digits.py as it is, and write down how long its steps took and what they came to."""
    import paceline as pl

    step, evaluate = pl.Trainer.step, pl.Trainer.evaluate
    watched: dict[str, float] = {}
    began = samples = 0.0

    def timed_step(trainer: pl.Trainer, batch: Any) -> float:
        nonlocal began, samples
        began = began or time.monotonic()
        before = trainer.ledger.next()
        watched["loss"] = step(trainer, batch)
        samples += before.size
        watched["seconds"] = time.monotonic() - began
        watched["samples_per_s"] = samples / watched["seconds"]
        return watched["loss"]

    def noted_evaluate(trainer: pl.Trainer, *dataset_and_metric: Any) -> Any:
        watched["accuracy"] = evaluate(trainer, *dataset_and_metric)
        return watched["accuracy"]

    pl.Trainer.step, pl.Trainer.evaluate = timed_step, noted_evaluate  # type: ignore[method-assign]
    sys.argv = [str(DIGITS), *arguments]
    runpy.run_path(str(DIGITS), run_name="__main__")
    if pl.place().rank == 0:
        (folder / "watched.json").write_text(json.dumps(watched))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer updates, and no run with 4 replicas")
    parser.add_argument("--stopwatch", type=Path, help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    if options.stopwatch is not None:
        _train_with_a_stopwatch(options.stopwatch, arguments)
        return 0
    if arguments:
        parser.error(f"unrecognized arguments: {' '.join(arguments)}")
    size = ["--width", "1024", "--batch-size", "250", "--epochs", "20" if options.quick else "60"]
    with tempfile.TemporaryDirectory(prefix="paceline-demo-") as folder:
        demo = Demo(Path(folder), size)
        runs = [demo.train("one process", None), demo.train("2 mirrored replicas", 2)]
        if not options.quick:
            runs.append(demo.train("4 mirrored replicas", 4))
        runs.append(demo.train("2 replicas, one killed", 2, kill_replica=1))
        demo.table(runs)
        agree = all(run.difference(runs[0]) <= SAME for run in runs)
        return demo.close(agree=demo.verify() and agree)


if __name__ == "__main__":
    sys.exit(main())
