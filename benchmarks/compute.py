"""A net that is all computing: how much of a second core is left after the exchange."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.measure import Claim, Result, Setting, fastest, per_round, time_in_turns
from benchmarks.training import Training, ddp_ways

TITLE = "Compute-bound net: four convolutions on 64×64 images, 16 samples a replica"
LEAST_SPEED_UP = 1.8

SIZES = {
    "full": Training("compute", 32, 4, batch_size=16, steps=16, warm_up=3),
    "quick": Training("compute", 32, 4, batch_size=4, steps=8, warm_up=2),
    "tiny": Training("compute", 2, 1, batch_size=2, steps=2, warm_up=1),
}


def run(setting: Setting) -> Result:
    training, ways = SIZES[setting.scale], ddp_ways(setting)
    contestants: dict[str, Callable[[], float]] = {
        "one process": training.one_process,
        "one replica": training.one_replica,
        "2 replicas, Paceline": partial(training.replicas, 2),
        **{f"2 replicas, {name}": partial(training.ddp, 2, *options) for name, options in ways.items()},
        "two processes apart": partial(training.apart, 2),
    }
    series = time_in_turns(contestants, setting, "ms a step")
    alone = fastest([series["one process"], series["one replica"]])
    peer = fastest([series[f"2 replicas, {name}"] for name in ways])
    claims = [
        Claim(
            text="Compute-bound net: samples/s of 2 replicas over one",
            rounds=per_round(alone, series["2 replicas, Paceline"], times=2),
            at_least=LEAST_SPEED_UP,
        ),
        Claim(text="Compute-bound net: the same for DDP", rounds=per_round(alone, peer, times=2)),
        Claim(
            text="Compute-bound net: the same for two processes apart",
            rounds=per_round(alone, series["two processes apart"], times=2),
        ),
    ]
    notes = ["“Two processes apart” have nothing to do with each other: the most that this machine's two cores give."]
    return Result(title=TITLE, series=tuple(series.values()), claims=tuple(claims), notes=tuple(notes))
