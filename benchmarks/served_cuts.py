"""Single requests over HTTP to a model that `paceline serve` cuts over two devices, against one device."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.http_servers import SCRIPTS, SERVE, Rounds, ask, output, quantile, started
from benchmarks.measure import Result, Setting

TITLE = "Cut models over HTTP"
CUTS = {  # what is asked of which cut
    "wide": ["--mesh", "model=2", "--layout", "hidden=model"],
    "images": ["--tiles", "2"],
}
SECONDS = {"full": 10.0, "quick": 3.0, "tiny": 0.3}
COUNTS = ("1 device", "2 devices")


def run(setting: Setting) -> Result:
    rounds = Rounds([_round(setting) for _ in range(setting.rounds)])
    units = {f"{model}, {count}": "ms" for model in CUTS for count in COUNTS}
    claims = tuple(
        rounds.claim(f"One request to {model}, through HTTP: two devices against one", f"{model}, ratio", at_most=0.6)
        for model in CUTS
    )
    return Result(title=TITLE, series=rounds.series(units), claims=claims)


def _round(setting: Setting) -> dict[str, float]:
    found: dict[str, float] = {}
    for model in CUTS:
        setting.say(f"{model}, cut and whole")
        found |= _cut(model, SECONDS[setting.scale], setting.scale)
    return found


def _cut(model: str, seconds: float, scale: str) -> dict[str, float]:
    """The median of single requests to a model on one device and on two."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SERVED_SCALE": scale, "SERVED_MODEL": model}
    script, found = str(SCRIPTS / "served_cut.py"), dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        path = str(Path(folder) / "model.safetensors")
        shape = json.loads(output([sys.executable, script, path], environment))
        rows = ",".join(["-1", *map(str, shape[1:])])
        command = [*SERVE, path, "--script", script, "--input", f"input:FP32:{rows}", "--deadline", "60s"]
        for count, flags in zip(COUNTS, ([], CUTS[model]), strict=True):
            with started([*command, *flags], environment) as (port, _):
                asked = {"ASKED_SHAPE": json.dumps(shape)}
                ask(port, 1, min(1.0, seconds), more=asked)  # cuts the model
                found[f"{model}, {count}"] = 1000 * quantile(ask(port, 1, seconds, more=asked)["200"], 0.5)
    found[f"{model}, ratio"] = found[f"{model}, 2 devices"] / found[f"{model}, 1 device"]
    return found
