"""`paceline serve` over HTTP: what it costs on top of the model, what batching gains, how it bends under ten times its
load. The clients are on the same two cores as the server: their work is in all figures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import Claim, Result, Series, Setting
from benchmarks.processes import Failed

TITLE = "Serving over HTTP"
SCRIPTS = Path(__file__).parent / "scripts"
CLIENTS = 32
OVERLOAD = 10.0
DEADLINE_S = 0.2
SIZES = {  # width of the model for overhead and batching, and for overload; seconds of each measurement
    "full": (1024, 3072, 10.0),
    "quick": (1024, 2048, 3.0),
    "tiny": (64, 64, 0.3),
}


def run(setting: Setting) -> Result:
    small, large, seconds = SIZES[setting.scale]
    rounds = [_round(small, large, seconds, setting) for _ in range(setting.rounds)]

    def series(name: str, unit: str) -> Series:
        return Series(name, unit, tuple(found[name] for found in rounds))

    def claim(text: str, name: str, *, at_least: float | None = None, at_most: float | None = None) -> Claim:
        return Claim(text=text, rounds=tuple(found[name] for found in rounds), at_least=at_least, at_most=at_most)

    names = {
        "the model alone": "ms",
        "HTTP over it, p50": "ms",
        "HTTP over it, p99": "ms",
        "one by one": "requests/s",
        "put together": "requests/s",
        "overload, accepted p99": "ms",
        "overload, refused p99": "ms",
        "overload, answered": "requests/s",
        "overload, refused": "requests/s",
        "overload, memory grown": "MB",
    }
    claims = (
        claim("One client: HTTP over calling the model, p50 in ms", "HTTP over it, p50", at_most=0.5),
        claim("One client: HTTP over calling the model, p99 in ms", "HTTP over it, p99", at_most=2.0),
        claim(f"{CLIENTS} clients: requests put together, against one by one", "gain", at_least=3.0),
        claim("Ten times the load: p99 of what is accepted, in deadlines", "overload, in deadlines", at_most=2.0),
        claim("Ten times the load: p99 of refusals, in ms", "overload, refused p99", at_most=5.0),
        claim("Ten times the load: answers that are neither 200 nor 429", "overload, errors", at_most=0.0),
    )
    notes = (
        f"MLP 256-{small}-{small}-10, 1 process of the model on 1 thread; overload: {large} wide, --max-batch 1, "
        f"--deadline {DEADLINE_S:g}s, at {OVERLOAD:g} times what it answers to {CLIENTS} clients.",
        "p99 under overload is of one machine that also makes the load.",
    )
    return Result(title=TITLE, series=tuple(series(*pair) for pair in names.items()), claims=claims, notes=notes)


def _round(small: int, large: int, seconds: float, setting: Setting) -> dict[str, float]:
    found: dict[str, float] = {}
    with _served(small, "--max-batch", "32") as (port, _, direct_s):
        setting.say("one client")
        one = _ask(port, 1, seconds)["200"]
        found["the model alone"] = 1000 * direct_s
        found["HTTP over it, p50"] = 1000 * (_quantile(one, 0.5) - direct_s)
        found["HTTP over it, p99"] = 1000 * (_quantile(one, 0.99) - direct_s)
        setting.say("32 clients")
        found["put together"] = len(_ask(port, CLIENTS, seconds)["200"]) / seconds
    with _served(small, "--max-batch", "1") as (port, _, _):
        found["one by one"] = len(_ask(port, CLIENTS, seconds)["200"]) / seconds
    found["gain"] = found["put together"] / found["one by one"]
    with _served(large, "--max-batch", "1", "--deadline", f"{DEADLINE_S}s") as (port, process, _):
        capacity = len(_ask(port, 2, seconds)["200"]) / seconds
        setting.say(f"{OVERLOAD:g} times {capacity:.0f} requests/s")
        before = psutil.Process(process).memory_info().rss
        answers = _ask(port, 512, 2 * seconds, OVERLOAD * capacity)
        grown = psutil.Process(process).memory_info().rss - before
        accepted, refused = answers.get("200", [0.0]), answers.get("429", [0.0])
        found["overload, accepted p99"] = 1000 * _quantile(accepted, 0.99)
        found["overload, in deadlines"] = _quantile(accepted, 0.99) / DEADLINE_S
        found["overload, refused p99"] = 1000 * _quantile(refused, 0.99)
        found["overload, answered"] = len(accepted) / (2 * seconds)
        found["overload, refused"] = len(refused) / (2 * seconds)
        found["overload, memory grown"] = grown / 1e6
        found["overload, errors"] = float(
            sum(len(times) for code, times in answers.items() if code not in ("200", "429"))
        )
    return found


@contextlib.contextmanager
def _served(width: int, *flags: str) -> Iterator[tuple[int, int, float]]:
    """A server of the model: its port, its process, and the seconds of a direct call."""
    environment = {**os.environ, "SERVED_WIDTH": str(width), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        path, script = str(Path(folder) / "mlp.safetensors"), str(SCRIPTS / "served_mlp.py")
        direct_s = float(_output([sys.executable, script, path, "300"], environment))
        command = [sys.executable, "-m", "paceline", "serve", path, "--script", script, "--input", "input:FP32:-1,256"]
        process = subprocess.Popen(
            [*command, "--port", "0", "--json", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                raise Failed("paceline serve did not start")
            yield json.loads(line)["port"], process.pid, direct_s
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            process.stdout.close()


def _ask(port: int, clients: int, seconds: float, rate: float | None = None) -> dict[str, list[float]]:
    """Seconds of answers by status, in order."""
    given = [str(port), str(clients), str(seconds), *([str(rate)] if rate is not None else [])]
    told: dict[str, Any] = json.loads(_output([sys.executable, str(SCRIPTS / "ask_http.py"), *given], dict(os.environ)))
    by_status: dict[str, list[float]] = told["by_status"]
    return {"200": [], **by_status} if rate is None else by_status


def _output(command: list[str], environment: dict[str, str]) -> str:
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise Failed(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr}")
    return run.stdout


def _quantile(times: list[float], share: float) -> float:
    if len(times) < 2:
        return times[0] if times else 0.0
    return statistics.quantiles(times, n=100, method="inclusive")[round(100 * share) - 1]
