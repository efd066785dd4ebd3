"""Ten times the load that `paceline serve` can bear, for a minute: what is accepted, what is refused, how soon."""

from __future__ import annotations

import psutil

from benchmarks.http_servers import Rounds, ask, quantile, served, told
from benchmarks.measure import Result, Setting

TITLE = "Ten times the load"
OVERLOAD = 10.0
CONNECTIONS = 512
DEADLINE_S = 0.2
SIZES = {"full": (3072, 10.0, 60.0), "quick": (2048, 3.0, 6.0), "tiny": (64, 0.3, 0.6)}
# width of the model; seconds in which it is found out what it can bear, and of the load


def run(setting: Setting) -> Result:
    width, seconds, overload_s = SIZES[setting.scale]
    rounds = Rounds([_round(width, seconds, overload_s, setting) for _ in range(setting.rounds)])
    units = {
        "accepted p50": "ms",
        "accepted p99": "ms",
        "refused p50": "ms",
        "refused p99": "ms",
        "answered": "requests/s",
        "refused": "requests/s",
        "not sent": "requests/s",
        "memory grown": "MB",
    }
    claims = (
        rounds.claim("Ten times the load: p99 of what is accepted, in deadlines", "in deadlines", at_most=2.0),
        rounds.claim("Ten times the load: p99 of refusals, in ms", "refused p99", at_most=5.0),
        rounds.claim("Ten times the load: answers that are neither 200 nor 429", "errors", at_most=0.0),
        rounds.claim("Ten times the load: memory grown, in MB", "memory grown", at_most=5.0),
    )
    notes = (
        f"MLP 256-{width}-{width}-10, 1 process of the model on 1 thread, --max-batch 1, --deadline {DEADLINE_S:g}s, "
        f"asked for {overload_s:g} s at {OVERLOAD:g} times what it answers to 2 clients, by {CONNECTIONS} connections.",
        "Whoever makes the load is on the same machine. Not sent: all connections were waiting for an answer.",
    )
    return Result(title=TITLE, series=rounds.series(units), claims=claims, notes=notes)


def _round(width: int, seconds: float, overload_s: float, setting: Setting) -> dict[str, float]:
    found: dict[str, float] = {}
    with served(width, "--max-batch", "1", "--deadline", f"{DEADLINE_S}s") as (port, process, _):
        setting.say("what it can bear")
        capacity = len(ask(port, 2, seconds)["200"]) / seconds
        setting.say(f"{OVERLOAD:g} times {capacity:.0f} requests/s")
        told(port, CONNECTIONS, min(2.0, seconds), OVERLOAD * capacity)  # what connections need is there from here on
        memory = psutil.Process(process).memory_info().rss
        heard = told(port, CONNECTIONS, overload_s, OVERLOAD * capacity)
        grown = psutil.Process(process).memory_info().rss - memory
    answers: dict[str, list[float]] = heard["by_status"]
    accepted, refused = answers.get("200", [0.0]), answers.get("429", [0.0])
    for name, times in (("accepted", accepted), ("refused", refused)):
        found[f"{name} p50"], found[f"{name} p99"] = 1000 * quantile(times, 0.5), 1000 * quantile(times, 0.99)
    found["in deadlines"] = quantile(accepted, 0.99) / DEADLINE_S
    found["answered"] = len(accepted) / overload_s
    found["refused"] = len(refused) / overload_s
    found["not sent"] = heard["unsent"] / overload_s
    found["memory grown"] = grown / 1e6
    found["errors"] = float(sum(len(times) for code, times in answers.items() if code not in ("200", "429")))
    return found
