"""What it costs that an update is in a log before it is acknowledged: steps with `--durability none` and `log`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from benchmarks.measure import Claim, Result, Setting, per_round, time_in_turns
from benchmarks.training import Training

TITLE = "Steps with and without a log: MLP of 1M and of 15M parameters, SGD with momentum, 2 replicas, 1 server"
REPLICAS = 2
KINDS = ("none", "log")
RULES = {"sync": (), "async": ("--async",)}


@dataclass(frozen=True)
class Size:
    trainings: dict[str, Training]


SIZES = {
    "full": Size(
        {
            "1M parameters": Training("mlp", 512, 4, batch_size=32, steps=60, warm_up=8),
            "15M parameters": Training("mlp", 2048, 4, batch_size=32, steps=25, warm_up=5),
        }
    ),
    "quick": Size({"1M parameters": Training("mlp", 512, 4, batch_size=32, steps=15, warm_up=3)}),
    "tiny": Size({"few parameters": Training("mlp", 8, 1, batch_size=2, steps=4, warm_up=1)}),
}


def run(setting: Setting) -> Result:
    trainings = SIZES[setting.scale].trainings
    contestants = {
        _named(what, rule, kind): partial(
            training.replicas, REPLICAS, "--servers", "1", "--durability", kind, *RULES[rule]
        )
        for what, training in trainings.items()
        for rule in RULES
        for kind in KINDS
    }
    series = time_in_turns(contestants, setting, "ms a step")
    claims = [
        Claim(
            text=f"{what}, {rule}: step with a log over that without",
            rounds=per_round(series[_named(what, rule, "log")], series[_named(what, rule, "none")]),
        )
        for what in trainings
        for rule in RULES
    ]
    note = "In an async run a step is a replica's own: it has all the samples of an update."
    return Result(title=TITLE, series=tuple(series.values()), claims=tuple(claims), notes=(note,))


def _named(what: str, rule: str, kind: str) -> str:
    return f"{what}, {rule}, --durability {kind}"
