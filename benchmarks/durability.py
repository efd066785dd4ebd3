"""What it costs that an update is in a log, or on another server, before it is acknowledged: push and pull alone.

Nothing is computed, so this is the price at its highest: a step is as long as it takes to write, or to send, what is
needed to make it again; and with `--durability replica` every server makes another one's steps as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.measure import Claim, Result, Setting, per_round, time_in_turns
from benchmarks.servers import Size

TITLE = "Push and pull with and without durability, plain SGD, 2 replicas, 2 servers"
REPLICAS = 2
SERVERS = ("--servers", "2")  # the least with which there is another
KINDS = ("none", "log", "replica")
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
        _named(what, rule, kind): partial(_step_ms, size, *SERVERS, *RULES[rule], "--durability", kind)
        for what, size in sizes.items()
        for rule in RULES
        for kind in KINDS
    }
    series = time_in_turns(contestants, setting, "ms a step of a replica")
    claims = [
        Claim(
            text=f"Push and pull of {what}, {rule}: step with --durability {kind} over that with none",
            rounds=per_round(series[_named(what, rule, kind)], series[_named(what, rule, "none")]),
        )
        for what in sizes
        for rule in RULES
        for kind in KINDS[1:]
    ]
    return Result(title=TITLE, series=tuple(series.values()), claims=tuple(claims))


def _step_ms(size: Size, *flags: str) -> float:
    return 1000 * REPLICAS / size.paceline(REPLICAS, *flags, fast=False)


def _named(what: str, rule: str, kind: str) -> str:
    return f"{what}, {rule}, --durability {kind}"
