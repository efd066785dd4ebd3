"""Servers over HTTP, `paceline serve` and others, and what they answer: for `serving`, `served_cuts` and `overload`.

The clients are on the same two cores as the server: their work is in all figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Claim, Series
from benchmarks.processes import Failed

SCRIPTS = Path(__file__).parent / "scripts"
SERVE = [sys.executable, "-m", "paceline", "serve", "--port", "0", "--json"]


@contextlib.contextmanager
def served(width: int, *flags: str) -> Iterator[tuple[int, int, float]]:
    """A server of the model: its port, its process, and the seconds of a direct call."""
    variables = environment(width)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        path, script = str(Path(folder) / "mlp.safetensors"), str(SCRIPTS / "served_mlp.py")
        direct_s = float(output([sys.executable, script, path, "300"], variables))
        command = [*SERVE, path, "--script", script, "--input", "input:FP32:-1,256", *flags]
        with started(command, variables) as (port, process):
            yield port, process, direct_s


@contextlib.contextmanager
def started(command: Sequence[str], variables: dict[str, str]) -> Iterator[tuple[int, int]]:
    """A server that tells its port in a line of JSON: the port, and its process."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=variables, start_new_session=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(b"{"):
                break
        else:
            raise Failed(f"{' '.join(command)} did not start")
        yield json.loads(line)["port"], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):  # LitServe leaves processes behind
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()


def environment(width: int) -> dict[str, str]:
    return {**os.environ, "SERVED_WIDTH": str(width), "OMP_NUM_THREADS": "1"}


def ask(port: int, clients: int, seconds: float, *, more: dict[str, str] | None = None) -> dict[str, list[float]]:
    """Seconds of answers by status, in order."""
    by_status: dict[str, list[float]] = told(port, clients, seconds, None, more or {})["by_status"]
    return {"200": [], **by_status}


def told(
    port: int, clients: int, seconds: float, rate: float | None, more: dict[str, str] | None = None
) -> dict[str, Any]:
    given = [str(port), str(clients), str(seconds), *([str(rate)] if rate is not None else [])]
    """Everything that ask_http.py has to say."""
    command = [sys.executable, str(SCRIPTS / "ask_http.py"), *given]
    found: dict[str, Any] = json.loads(output(command, {**os.environ, **(more or {})}))
    return found


def output(command: list[str], variables: dict[str, str]) -> str:
    run = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if run.returncode:
        raise Failed(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr}")
    return run.stdout


def quantile(times: list[float], share: float) -> float:
    if len(times) < 2:
        return times[0] if times else 0.0
    return statistics.quantiles(times, n=100, method="inclusive")[round(100 * share) - 1]


class Rounds:
    """Figures by name, those of a round together, as series and claims."""

    def __init__(self, rounds: Sequence[Mapping[str, float]]) -> None:
        self._rounds = rounds

    def series(self, units: Mapping[str, str]) -> tuple[Series, ...]:
        return tuple(Series(name, unit, tuple(found[name] for found in self._rounds)) for name, unit in units.items())

    def claim(self, text: str, name: str, *, at_least: float | None = None, at_most: float | None = None) -> Claim:
        figures = tuple(found[name] for found in self._rounds)
        return Claim(text=text, rounds=figures, at_least=at_least, at_most=at_most)
