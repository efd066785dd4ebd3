"""What it costs that an update is in a log before it is acknowledged: push and pull with `--durability none` and `log`.

Nothing is computed, so this is the price at its highest: a step is as long as it takes to write what is needed to make
it again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.measure import Claim, Result, Setting, per_round, time_in_turns
from benchmarks.servers import Size

TITLE = "Push and pull with and without a log, plain SGD, 2 replicas, 1 server"
REPLICAS = 2
KINDS = ("none", "log")
RULES = {"sync": (), "async": ("--async",)}
SIZES = {
    "full": {
        "400 KB": Size(400_000, (REPLICAS,), steps=200, fast_steps=0, warm_up=20),
        "40 MB": Size(40_000_000, (REPLICAS,), steps=40, fast_steps=0, warm_up=8),
    },
    "quick": {"400 KB": Size(400_000, (REPLICAS,), steps=40, fast_steps=0, warm_up=8)},
    "tiny": {"4 KB": Size(4_000, (REPLICAS,), steps=8, fast_steps=0, warm_up=2)},
}


def run(setting: Setting) -> Result:
    sizes = SIZES[setting.scale]
    contestants: dict[str, Callable[[], float]] = {
        _named(what, rule, kind): partial(_step_ms, size, *RULES[rule], "--durability", kind)
        for what, size in sizes.items()
        for rule in RULES
        for kind in KINDS
    }
    series = time_in_turns(contestants, setting, "ms a step of a replica")
    claims = [
        Claim(
            text=f"Push and pull of {what}, {rule}: step with a log over that without",
            rounds=per_round(series[_named(what, rule, "log")], series[_named(what, rule, "none")]),
        )
        for what in sizes
        for rule in RULES
    ]
    return Result(title=TITLE, series=tuple(series.values()), claims=tuple(claims))


def _step_ms(size: Size, *flags: str) -> float:
    return 1000 * REPLICAS / size.paceline(REPLICAS, *flags, fast=False)


def _named(what: str, rule: str, kind: str) -> str:
    return f"{what}, {rule}, --durability {kind}"
