"""A conv net of 0.26M parameters with BatchNorm: steps so short that every wait shows.

DDP's BatchNorm knows the statistics of a rank's own samples only, so like is compared with like when Paceline's does
too (`--batchnorm local`). Its default uses those of the whole batch, as SyncBatchNorm would, if that ran here.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from benchmarks.measure import Claim, Result, Setting, fastest, per_round, time_in_turns
from benchmarks.training import Training, ddp_ways

TITLE = "Conv net of 0.26M parameters with BatchNorm, 32 samples a replica, 2 replicas"
LEAST = 1.0
KINDS = {"local": "Paceline, --batchnorm local", "exact": "Paceline, exact BatchNorm"}

SIZES = {
    "full": Training("conv", 32, 4, batch_size=32, steps=60, warm_up=8),
    "quick": Training("conv", 32, 4, batch_size=32, steps=20, warm_up=4),
    "tiny": Training("conv", 2, 4, batch_size=2, steps=2, warm_up=1),
}


def run(setting: Setting) -> Result:
    training, ways = SIZES[setting.scale], ddp_ways(setting)
    contestants = {name: partial(training.replicas, 2, "--batchnorm", kind) for kind, name in KINDS.items()}
    contestants |= {name: partial(training.ddp, 2, *options) for name, options in ways.items()}
    series = time_in_turns(contestants, setting, "ms a step")
    peer = fastest([series[name] for name in ways])
    claims = [
        Claim(
            text=f"Conv net, {kind} BatchNorm: samples/s over DDP's",
            rounds=per_round(peer, series[name]),
            at_least=LEAST,
        )
        for kind, name in KINDS.items()
    ]
    return Result(title=TITLE, series=tuple(series.values()), claims=tuple(claims), notes=(_sync_batchnorm(),))


def _sync_batchnorm() -> str:
    """Whether DDP has an exact BatchNorm to compare with here."""
    try:
        nn.SyncBatchNorm(2)(torch.zeros(2, 2, 2, 2))
    except ValueError as error:
        return (
            f"DDP's exact BatchNorm is SyncBatchNorm, which does not run here (“{error}”): "
            "exact is held against DDP's local one."
        )
    return "SyncBatchNorm runs here, and could be compared with exact BatchNorm."
