"""An MLP of about 15M parameters, 32 samples a replica: what the exchange and the optimizer cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.measure import Claim, Result, Series, Setting, fastest, per_round, time_in_turns
from benchmarks.training import DDP_FUSED, Training, ddp_ways

TITLE = "MLP of 15M parameters, 32 samples a replica"

# (optimizer, replicas): samples/s over DDP's
BARS = {("adamw", 2): 1.5, ("adamw", 4): 2.0, ("sgd", 2): 1.4}
MOST_OVER_ALONE = 1.10
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD+momentum"}


@dataclass(frozen=True)
class Size:
    training: Training
    optimizers: tuple[str, ...] = ("adamw", "sgd")
    replicas: tuple[int, ...] = (2, 4)


SIZES = {
    "full": Size(Training("mlp", 2048, 4, batch_size=32, steps=20, warm_up=4)),
    "quick": Size(Training("mlp", 512, 4, batch_size=32, steps=10, warm_up=2)),
    "tiny": Size(Training("mlp", 16, 1, batch_size=2, steps=2, warm_up=1), optimizers=("sgd",), replicas=(2,)),
}


def run(setting: Setting) -> Result:
    size, ways = SIZES[setting.scale], ddp_ways(setting)
    contestants = {}
    for optimizer in size.optimizers:
        training, label = replace(size.training, optimizer=optimizer), OPTIMIZERS[optimizer]
        contestants[f"{label}, one process"] = training.one_process
        contestants[f"{label}, one replica"] = training.one_replica
        contestants[f"{label}, two processes apart"] = partial(training.apart, 2)
        for count in size.replicas:
            contestants[f"{label}, {count} replicas, Paceline"] = partial(training.replicas, count)
            for name, options in {**ways, **(DDP_FUSED if count == 2 else {})}.items():
                contestants[f"{label}, {count} replicas, {name}"] = partial(training.ddp, count, *options)
    series = time_in_turns(contestants, setting, "ms a step")
    claims = [claim for optimizer in size.optimizers for claim in _claims(series, optimizer, size.replicas, ways)]
    notes = [
        "“Two processes apart” train at the same time, with nothing in common: what two busy cores cost.",
        "Paceline uses the fused kernel of the user's optimizer class where torch has one; DDP with it is shown.",
    ]
    return Result(title=TITLE, series=tuple(series.values()), claims=tuple(claims), notes=tuple(notes))


def _claims(series: Mapping[str, Series], optimizer: str, replicas: Iterable[int], ways: Iterable[str]) -> list[Claim]:
    label = OPTIMIZERS[optimizer]
    claims = []
    for count in replicas:
        of = f"{label}, {count} replicas"
        paceline = series[f"{of}, Paceline"]
        peer = fastest([series[f"{of}, {name}"] for name in ways])
        claims.append(
            Claim(
                text=f"MLP, {of}: samples/s over DDP's",
                rounds=per_round(peer, paceline),
                at_least=BARS.get((optimizer, count)),
            )
        )
        for name in DDP_FUSED if count == 2 else ():
            claims.append(Claim(text=f"MLP, {of}: over {name}", rounds=per_round(series[f"{of}, {name}"], paceline)))
    two = series[f"{label}, 2 replicas, Paceline"]
    alone = fastest([series[f"{label}, one process"], series[f"{label}, one replica"]])
    apart = series[f"{label}, two processes apart"]
    claims += [
        Claim(
            text=f"MLP, {label}: step of 2 replicas over one alone",
            rounds=per_round(two, alone),
            at_most=MOST_OVER_ALONE,
        ),
        Claim(
            text=f"MLP, {label}: step of two processes apart over one",
            rounds=per_round(apart, series[f"{label}, one process"]),
        ),
    ]
    return claims
