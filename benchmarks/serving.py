"""`paceline serve` over HTTP: its cost on top of the model, beside others', and what batching gains."""

from __future__ import annotations

import psutil

from benchmarks.http_servers import SCRIPTS, Rounds, ask, environment, quantile, served, started
from benchmarks.measure import Result, Setting
from benchmarks.peers import PEERS

TITLE = "Serving over HTTP"
CLIENTS = 32
APART, TOGETHER = "one by one", "put together"
PEER_SCRIPTS = {"FastAPI": "peer_fastapi.py", "LitServe": "peer_litserve.py", "Ray Serve": "peer_ray_serve.py"}
# Width of the model that shows what HTTP costs, and of the one whose requests pay to be put together: where a product
# takes less than what HTTP does around it, nothing does. And seconds of each.
SIZES = {"full": (1024, 2048, 10.0), "quick": (1024, 2048, 3.0), "tiny": (64, 64, 0.3)}


def run(setting: Setting) -> Result:
    width, wide, seconds = SIZES[setting.scale]
    peers = {name: script for name, script in PEER_SCRIPTS.items() if PEERS[name].version() is not None}
    if setting.scale == "tiny":
        peers = {}
    rounds = Rounds([_round(width, wide, seconds, peers, setting) for _ in range(setting.rounds)])
    units = {
        "the model alone": "ms",
        "HTTP over it, p50": "ms",
        "HTTP over it, p99": "ms",
        **{f"{peer} over it, {share}": "ms" for peer in peers for share in ("p50", "p99")},
        "HTTP process, CPU a request": "µs",
        "model process, CPU a request": "µs",
        **{f"{size} wide, {how}": "requests/s" for size in dict.fromkeys((width, wide)) for how in (APART, TOGETHER)},
    }
    claims = (
        rounds.claim("One client: HTTP over calling the model, p50 in ms", "HTTP over it, p50", at_most=0.5),
        rounds.claim("One client: HTTP over calling the model, p99 in ms", "HTTP over it, p99", at_most=2.0),
        rounds.claim(
            f"{CLIENTS} clients, {wide} wide: requests put together, against one by one", "gain", at_least=3.0
        ),
        rounds.claim("One client: latency with batching, of that without", "unchanged", at_most=1.05),
    )
    missing = ", ".join(name for name in PEER_SCRIPTS if name not in peers)
    notes = (
        f"MLP 256-{width}-{width}-10, for {CLIENTS} clients 256-{wide}-{wide}-10 too, 1 process of it on 1 thread.",
        *((f"Not installed here: {missing} (`make peers`).",) if missing else ()),
    )
    return Result(title=TITLE, series=rounds.series(units), claims=claims, notes=notes)


def _round(width: int, wide: int, seconds: float, peers: dict[str, str], setting: Setting) -> dict[str, float]:
    found: dict[str, float] = {}
    with served(width, "--max-batch", "32") as (port, process, direct_s):
        setting.say("one client")
        before = _cpu_s(process)
        one = ask(port, 1, seconds)["200"]
        took = [after - first for first, after in zip(before, _cpu_s(process), strict=True)]
        found["HTTP process, CPU a request"], found["model process, CPU a request"] = (
            1e6 * spent / max(1, len(one)) for spent in took
        )
        found["the model alone"] = 1000 * direct_s
        found["HTTP over it, p50"] = 1000 * (quantile(one, 0.5) - direct_s)
        found["HTTP over it, p99"] = 1000 * (quantile(one, 0.99) - direct_s)
    with served(width, "--max-batch", "1") as (port, _, _):
        found["unchanged"] = quantile(one, 0.5) / quantile(ask(port, 1, seconds)["200"], 0.5)
    for size in dict.fromkeys((width, wide)):
        for how, most in ((TOGETHER, "32"), (APART, "1")):
            setting.say(f"{CLIENTS} clients, {size} wide, {how}")
            with served(size, "--max-batch", most) as (port, _, _):
                found[f"{size} wide, {how}"] = len(ask(port, CLIENTS, seconds)["200"]) / seconds
    found["gain"] = found[f"{wide} wide, {TOGETHER}"] / found[f"{wide} wide, {APART}"]
    for name, script in peers.items():
        setting.say(name)
        with started([str(PEERS[name].python), str(SCRIPTS / script)], environment(width)) as (port, _):
            ask(port, 1, min(1.0, seconds))  # the first requests take longer
            one = ask(port, 1, seconds)["200"]
        found[f"{name} over it, p50"] = 1000 * (quantile(one, 0.5) - direct_s)
        found[f"{name} over it, p99"] = 1000 * (quantile(one, 0.99) - direct_s)
    return found


def _cpu_s(process: int) -> tuple[float, float]:
    """The seconds that the HTTP process has computed, and the processes of the model below the template."""
    http = psutil.Process(process)
    models = [child for template in http.children() for child in template.children()]
    return sum(http.cpu_times()[:2]), sum(sum(model.cpu_times()[:2]) for model in models)
