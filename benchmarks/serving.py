"""`paceline serve` over HTTP: its cost on top of the model beside others', batching, cut models, ten times the load.

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import Claim, Result, Series, Setting
from benchmarks.peers import PEERS
from benchmarks.processes import Failed

TITLE = "Serving over HTTP"
SCRIPTS = Path(__file__).parent / "scripts"
CLIENTS = 32
OVERLOAD = 10.0
DEADLINE_S = 0.2
PEER_SCRIPTS = {"FastAPI": "peer_fastapi.py", "LitServe": "peer_litserve.py", "Ray Serve": "peer_ray_serve.py"}
CUTS = {  # what is asked of which cut
    "wide": ["--mesh", "model=2", "--layout", "hidden=model"],
    "images": ["--tiles", "2"],
}
SIZES = {  # width of the model for overhead and batching, and for overload; seconds of each measurement, of overload
    "full": (1024, 3072, 10.0, 60.0),
    "quick": (1024, 2048, 3.0, 6.0),
    "tiny": (64, 64, 0.3, 0.6),
}


def run(setting: Setting) -> Result:
    small, large, seconds, overload_s = SIZES[setting.scale]
    peers = {name: script for name, script in PEER_SCRIPTS.items() if PEERS[name].version() is not None}
    if setting.scale == "tiny":
        peers = {}
    rounds = [_round(small, large, seconds, overload_s, peers, setting) for _ in range(setting.rounds)]

    def series(name: str, unit: str) -> Series:
        return Series(name, unit, tuple(found[name] for found in rounds))

    def claim(text: str, name: str, *, at_least: float | None = None, at_most: float | None = None) -> Claim:
        return Claim(text=text, rounds=tuple(found[name] for found in rounds), at_least=at_least, at_most=at_most)

    names = {
        "the model alone": "ms",
        "HTTP over it, p50": "ms",
        "HTTP over it, p99": "ms",
        **{f"{peer} over it, {share}": "ms" for peer in peers for share in ("p50", "p99")},
        "HTTP process, CPU a request": "µs",
        "model process, CPU a request": "µs",
        "one by one": "requests/s",
        "put together": "requests/s",
        **({f"{model}, {count}": "ms" for model in CUTS for count in ("1 device", "2 devices")}),
        "overload, accepted p99": "ms",
        "overload, refused p99": "ms",
        "overload, answered": "requests/s",
        "overload, refused": "requests/s",
        "overload, not sent": "requests/s",
        "overload, memory grown": "MB",
    }
    claims = (
        claim("One client: HTTP over calling the model, p50 in ms", "HTTP over it, p50", at_most=0.5),
        claim("One client: HTTP over calling the model, p99 in ms", "HTTP over it, p99", at_most=2.0),
        claim(f"{CLIENTS} clients: requests put together, against one by one", "gain", at_least=3.0),
        *(
            claim(f"One request to {model}, through HTTP: two devices against one", f"{model}, ratio", at_most=0.6)
            for model in CUTS
        ),
        claim("Ten times the load: p99 of what is accepted, in deadlines", "overload, in deadlines", at_most=2.0),
        claim("Ten times the load: p99 of refusals, in ms", "overload, refused p99", at_most=5.0),
        claim("Ten times the load: answers that are neither 200 nor 429", "overload, errors", at_most=0.0),
    )
    missing = ", ".join(name for name in PEER_SCRIPTS if name not in peers)
    notes = (
        f"MLP 256-{small}-{small}-10, 1 process of the model on 1 thread; overload: {large} wide, --max-batch 1, "
        f"--deadline {DEADLINE_S:g}s, at {OVERLOAD:g} times what it answers to 2 clients.",
        "p99 under overload is of one machine that also makes the load.",
        *((f"Not installed here: {missing} (`make peers`).",) if missing else ()),
    )
    return Result(title=TITLE, series=tuple(series(*pair) for pair in names.items()), claims=claims, notes=notes)


def _round(
    small: int, large: int, seconds: float, overload_s: float, peers: dict[str, str], setting: Setting
) -> dict[str, float]:
    found: dict[str, float] = {}
    with _served(small, "--max-batch", "32") as (port, process, direct_s):
        setting.say("one client")
        before = _cpu_s(process)
        one = _ask(port, 1, seconds)["200"]
        took = [after - first for first, after in zip(before, _cpu_s(process), strict=True)]
        found["HTTP process, CPU a request"], found["model process, CPU a request"] = (
            1e6 * spent / max(1, len(one)) for spent in took
        )
        found["the model alone"] = 1000 * direct_s
        found["HTTP over it, p50"] = 1000 * (_quantile(one, 0.5) - direct_s)
        found["HTTP over it, p99"] = 1000 * (_quantile(one, 0.99) - direct_s)
        setting.say("32 clients")
        found["put together"] = len(_ask(port, CLIENTS, seconds)["200"]) / seconds
    for name, script in peers.items():
        setting.say(name)
        with _started([str(PEERS[name].python), str(SCRIPTS / script)], _environment(small)) as (port, _):
            _ask(port, 1, min(1.0, seconds))  # the first requests take longer
            one = _ask(port, 1, seconds)["200"]
        found[f"{name} over it, p50"] = 1000 * (_quantile(one, 0.5) - direct_s)
        found[f"{name} over it, p99"] = 1000 * (_quantile(one, 0.99) - direct_s)
    with _served(small, "--max-batch", "1") as (port, _, _):
        found["one by one"] = len(_ask(port, CLIENTS, seconds)["200"]) / seconds
    found["gain"] = found["put together"] / found["one by one"]
    for model in CUTS:
        setting.say(f"{model}, cut and whole")
        found |= _cut(model, seconds, setting.scale)
    with _served(large, "--max-batch", "1", "--deadline", f"{DEADLINE_S}s") as (port, process, _):
        capacity = len(_ask(port, 2, seconds)["200"]) / seconds
        setting.say(f"{OVERLOAD:g} times {capacity:.0f} requests/s")
        memory = psutil.Process(process).memory_info().rss
        told = _told(port, 512, overload_s, OVERLOAD * capacity)
        grown = psutil.Process(process).memory_info().rss - memory
    answers: dict[str, list[float]] = told["by_status"]
    accepted, refused = answers.get("200", [0.0]), answers.get("429", [0.0])
    found["overload, accepted p99"] = 1000 * _quantile(accepted, 0.99)
    found["overload, in deadlines"] = _quantile(accepted, 0.99) / DEADLINE_S
    found["overload, refused p99"] = 1000 * _quantile(refused, 0.99)
    found["overload, answered"] = len(accepted) / overload_s
    found["overload, refused"] = len(refused) / overload_s
    found["overload, not sent"] = told["unsent"] / overload_s
    found["overload, memory grown"] = grown / 1e6
    found["overload, errors"] = float(sum(len(times) for code, times in answers.items() if code not in ("200", "429")))
    return found


def _cut(model: str, seconds: float, scale: str) -> dict[str, float]:
    """The median of single requests to a model on one device and on two."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SERVED_SCALE": scale, "SERVED_MODEL": model}
    script, found = str(SCRIPTS / "served_cut.py"), dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        path = str(Path(folder) / "model.safetensors")
        shape = json.loads(_output([sys.executable, script, path], environment))
        rows = ",".join(["-1", *map(str, shape[1:])])
        command = [*_SERVE, path, "--script", script, "--input", f"input:FP32:{rows}", "--deadline", "60s"]
        for count, flags in (("1 device", []), ("2 devices", CUTS[model])):
            with _started([*command, *flags], environment) as (port, _):
                asked = {"ASKED_SHAPE": json.dumps(shape)}
                _ask(port, 1, min(1.0, seconds), more=asked)  # cuts the model
                found[f"{model}, {count}"] = 1000 * _quantile(_ask(port, 1, seconds, more=asked)["200"], 0.5)
    found[f"{model}, ratio"] = found[f"{model}, 2 devices"] / found[f"{model}, 1 device"]
    return found


_SERVE = [sys.executable, "-m", "paceline", "serve", "--port", "0", "--json"]


@contextlib.contextmanager
def _served(width: int, *flags: str) -> Iterator[tuple[int, int, float]]:
    """A server of the model: its port, its process, and the seconds of a direct call."""
    environment = _environment(width)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        path, script = str(Path(folder) / "mlp.safetensors"), str(SCRIPTS / "served_mlp.py")
        direct_s = float(_output([sys.executable, script, path, "300"], environment))
        command = [*_SERVE, path, "--script", script, "--input", "input:FP32:-1,256", *flags]
        with _started(command, environment) as (port, process):
            yield port, process, direct_s


@contextlib.contextmanager
def _started(command: Sequence[str], environment: dict[str, str]) -> Iterator[tuple[int, int]]:
    """A server that tells its port in a line of JSON: the port, and its process."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
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
        process.stdout.close()


def _environment(width: int) -> dict[str, str]:
    return {**os.environ, "SERVED_WIDTH": str(width), "OMP_NUM_THREADS": "1"}


def _cpu_s(process: int) -> tuple[float, float]:
    """The seconds that the HTTP process has computed, and the processes of the model below the template."""
    http = psutil.Process(process)
    models = [child for template in http.children() for child in template.children()]
    return sum(http.cpu_times()[:2]), sum(sum(model.cpu_times()[:2]) for model in models)


def _ask(port: int, clients: int, seconds: float, *, more: dict[str, str] | None = None) -> dict[str, list[float]]:
    """Seconds of answers by status, in order."""
    by_status: dict[str, list[float]] = _told(port, clients, seconds, None, more or {})["by_status"]
    return {"200": [], **by_status}


def _told(
    port: int, clients: int, seconds: float, rate: float | None, more: dict[str, str] | None = None
) -> dict[str, Any]:
    given = [str(port), str(clients), str(seconds), *([str(rate)] if rate is not None else [])]
    environment = {**os.environ, **(more or {})}
    told: dict[str, Any] = json.loads(_output([sys.executable, str(SCRIPTS / "ask_http.py"), *given], environment))
    return told


def _output(command: list[str], environment: dict[str, str]) -> str:
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise Failed(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr}")
    return run.stdout


def _quantile(times: list[float], share: float) -> float:
    if len(times) < 2:
        return times[0] if times else 0.0
    return statistics.quantiles(times, n=100, method="inclusive")[round(100 * share) - 1]
