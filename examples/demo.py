"""`make demo`: what Paceline promises, shown on this machine in about a minute.

1. digits.py is trained by one plain process, and by 2 and 4 mirrored replicas: the same result, side by side.
2. It is trained by 2 replicas once more, and one of them is killed in the middle: still the same result.
3. `paceline verify` compares the first steps, tensor by tensor.

The exit code is 0 only if all of that is so. Every run is started as one would by hand, in processes of its own; a
stopwatch around the trainer is all that is added to digits.py (`train_with_a_stopwatch`).
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
from contextlib import contextmanager, suppress
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
SAME = 1e-8  # in float64: what training makes of rounding is well below, and a mistake would be well above
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

    def train(self, name: str, replicas: int | None, *, kill: int | None = None) -> Trained:
        """Train digits.py; `replicas=None` is plain `python digits.py`, `kill` the replica to kill in the middle."""
        folder = self._folder / name.replace(" ", "-")
        folder.mkdir()
        own = ["--stopwatch", str(folder), *self._arguments, "--save", str(folder / "model.safetensors")]
        command = [sys.executable, str(DEMO), *own]
        if replicas is not None:
            flags = ["--replicas", str(replicas), "--run-folder", str(folder / "run"), "--quiet"]
            command = [*PACELINE, "run", str(DEMO), *flags, "--", *own]
        with (
            self._working(f"training: {name}"),
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run,
        ):
            if kill is not None:
                _kill_in_the_middle(run, folder / "run" / "events.jsonl", kill)
            try:
                _, errors = run.communicate(timeout=LONGEST_RUN_S)
            except subprocess.TimeoutExpired:
                run.kill()  # its replicas end with it
                raise SystemExit(f"{name}: still running after {LONGEST_RUN_S:g} s") from None
        said = errors.decode(errors="replace").strip()
        if run.returncode:
            raise SystemExit(f"{said}\n{name}: ended with exit code {run.returncode}")
        if kill is not None:
            assert "was killed by SIGKILL" in said, "the run was over before its replica could be killed"
            self._console.print(f"  {said}", style="dim", markup=False, soft_wrap=True)
        watched = json.loads((folder / "watched.json").read_text())
        return Trained(name, **watched, parameters=load_file(folder / "model.safetensors"))

    def verify(self) -> bool:
        with self._working("paceline verify"):
            command = [*PACELINE, "verify", str(DIGITS), "--replicas", "2", "--", *self._arguments]
            verdict = subprocess.run(command, text=True, stdout=subprocess.PIPE)
        self._console.print(f"  {verdict.stdout.strip()}", style="dim", markup=False, soft_wrap=True)
        return verdict.returncode == 0

    # ── what is seen ─────────────────────────────────────────────────────────────────────────────────────────

    def table(self, runs: list[Trained]) -> None:
        table = Table(
            title=f"digits.py {' '.join(self._arguments)}",
            caption="* largest difference of any parameter to one process",
        )
        table.add_column("trained by", no_wrap=True)
        for column in ("accuracy", "last loss", "training", "samples/s", "differs by*"):
            table.add_column(column, justify="right", no_wrap=True)
        reference = runs[0]
        for run in runs:
            off = "" if run is reference else f"{run.difference(reference):.1e}"
            cells = (f"{run.accuracy:.4f}", f"{run.loss:.6f}", f"{run.seconds:.2f} s", f"{run.samples_per_s:,.0f}", off)
            table.add_row(run.name, *cells)
        self._console.print(table)

    def say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)

    @contextmanager
    def _working(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        if not self._console.is_terminal:
            self.say(f"{what} …")
        with self._console.status(f"{what} …"):
            yield
        self.say(f"{what}: {time.monotonic() - began:.1f} s, with the start of its processes")


def _kill_in_the_middle(run: subprocess.Popen[bytes], events: Path, replica: int) -> None:
    """`kill -9` for that replica, as soon as the run reports steps."""
    while run.poll() is None:
        lines = events.read_bytes().splitlines(keepends=True) if events.exists() else []
        known = [json.loads(line) for line in lines if line.endswith(b"\n")]
        if any(event["event"] == "step" for event in known):
            (pid,) = (event["pid"] for event in known if event["event"] == "started" and event["replica"] == replica)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.02)


def train_with_a_stopwatch(folder: Path, arguments: list[str]) -> None:
    """In a process that trains: run digits.py as it is, and write down what its trainer did and how long it took."""
    import torch

    import paceline as pl

    torch.set_default_dtype(torch.float64)  # in float32 rounding can grow into a difference that nobody made
    watched: dict[str, float] = {}

    class Watched(pl.Trainer):
        def step(self, batch: Any) -> float:
            watched.setdefault("began", time.monotonic())
            watched["samples"] = watched.get("samples", 0) + self.ledger.next().size
            watched["loss"] = super().step(batch)
            watched["ended"] = time.monotonic()
            return watched["loss"]

        def evaluate(self, *arguments: Any, **options: Any) -> Any:
            watched["accuracy"] = super().evaluate(*arguments, **options)
            return watched["accuracy"]

    pl.Trainer = Watched  # type: ignore[misc]
    sys.argv = [str(DIGITS), *arguments]
    runpy.run_path(str(DIGITS), run_name="__main__")
    if pl.place().rank == 0:
        seconds = watched.pop("ended") - watched.pop("began")
        watched.update(seconds=seconds, samples_per_s=watched.pop("samples") / seconds)
        (folder / "watched.json").write_text(json.dumps(watched))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one process and the killed run only, with fewer updates")
    parser.add_argument("--stopwatch", type=Path, help=argparse.SUPPRESS)
    options, arguments = parser.parse_known_args()
    if options.stopwatch is not None:
        train_with_a_stopwatch(options.stopwatch, arguments)
        return 0
    if arguments:
        parser.error(f"unrecognized arguments: {' '.join(arguments)}")
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    size = ["--width", "1024", "--batch-size", "250", "--epochs", "15" if options.quick else "40"]
    with tempfile.TemporaryDirectory(prefix="paceline-demo-") as folder:
        demo = Demo(Path(folder), size)
        runs = [demo.train("one process", None)]
        if not options.quick:
            runs += [demo.train(f"{replicas} replicas", replicas) for replicas in (2, 4)]
        runs.append(demo.train("2, one killed", 2, kill=1))
        verified = options.quick or demo.verify()
        demo.table(runs)
        if load > cores / 2:
            demo.say(f"This machine was busy when we began (load {load:.1f} on {cores} cores): the times say little.")
        agree = verified and all(run.difference(runs[0]) <= SAME for run in runs)
        demo.say("[green]All results agree.[/green]" if agree else "[red]The results differ.[/red]")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
