"""Stacked LSTM layers over 64 time steps, as one module and as cells in a loop, cut by layer and time over two devices,
each a pinned core, against one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from benchmarks import processes
from benchmarks.measure import Claim, Result, Series, Setting, fastest, per_round, time_in_turns
from benchmarks.training import Training

TITLE = "LSTM of 2 and 4 layers, hidden 512, 64 steps, batch 32, --wavefront 2"
LEAST = 1.4
TIME_BLOCK = 8  # the default, which is held to the bar
ALONE = "one device"
CELLS = "cells in a loop, "


@dataclass(frozen=True)
class Size:
    training: Training
    depths: tuple[int, ...] = (2, 4)
    time_blocks: tuple[int, ...] = (4, TIME_BLOCK, 16)
    micro_batches: tuple[int, ...] = (2, 4, 8)  # of the pipeline, which is judged by the best of them


SIZES = {
    "full": Size(Training("lstm", 512, 2, batch_size=32, steps=12, warm_up=3)),
    "quick": Size(Training("lstm", 128, 2, batch_size=32, steps=6, warm_up=2)),
    "tiny": Size(
        Training("lstm", 4, 2, batch_size=4, steps=2, warm_up=1),
        depths=(2,),
        time_blocks=(TIME_BLOCK,),
        micro_batches=(2,),
    ),
}


def run(setting: Setting) -> Result:
    size = SIZES[setting.scale]
    contestants = {}
    for depth in size.depths:
        training = replace(size.training, depth=depth)
        contestants[f"{depth} layers, {ALONE}"] = training.one_process
        for block in size.time_blocks:
            flags = ("--wavefront", "2", "--time-block", str(block))
            contestants[_in_waves(depth, block)] = partial(training.replicas, 1, *flags)
        cells = replace(training, model="cells")
        contestants[f"{CELLS}{depth} layers, {ALONE}"] = cells.one_process
        contestants[CELLS + _in_waves(depth, TIME_BLOCK)] = partial(
            cells.replicas, 1, "--wavefront", "2", "--time-block", str(TIME_BLOCK)
        )
        for count in size.micro_batches:
            contestants[_pipelined(depth, count)] = partial(_pipeline, training, count)
    series = time_in_turns(contestants, setting, "ms a step")
    claims = [claim for depth in size.depths for claim in _claims(series, depth, size)]
    notes = (
        "Two devices that never waited would be 2 times as fast as one; with 8 blocks the last one begins a block late "
        "and the first one ends a block late, in forward and in backward.",
        "Beside it the same layers, half on each device, the batch cut into micro-batches instead of time: "
        "torch.distributed.pipelining on Gloo, 1F1B.",
    )
    return Result(title=TITLE, series=tuple(series.values()), claims=tuple(claims), notes=notes)


def _in_waves(depth: int, block: int) -> str:
    return f"{depth} layers, 2 devices, time blocks of {block}"


def _pipelined(depth: int, count: int) -> str:
    return f"{depth} layers, 2 devices, torch's pipeline, {count} micro-batches"


def _pipeline(training: Training, micro_batches: int) -> float:
    options = ["--micro-batches", str(micro_batches)]
    return training.time(lambda times: processes.ranks("train_pipeline.py", [*training.arguments(times), *options], 2))


def _claims(series: Mapping[str, Series], depth: int, size: Size) -> list[Claim]:
    alone = series[f"{depth} layers, {ALONE}"]
    pipeline = fastest([series[_pipelined(depth, count)] for count in size.micro_batches])
    claims = [
        Claim(
            text=f"LSTM of {depth} layers, training, time blocks of {block}: two devices over one",
            rounds=per_round(alone, series[_in_waves(depth, block)]),
            at_least=LEAST if block == TIME_BLOCK else None,
        )
        for block in size.time_blocks
    ]
    claims += [
        Claim(
            text=f"{CELLS}{depth} layers, training, time blocks of {TIME_BLOCK}: two devices over one",
            rounds=per_round(series[f"{CELLS}{depth} layers, {ALONE}"], series[CELLS + _in_waves(depth, TIME_BLOCK)]),
            at_least=LEAST,
        ),
        Claim(
            text=f"LSTM of {depth} layers, training, torch's pipeline: two devices over one",
            rounds=per_round(alone, pipeline),
        ),
        Claim(
            text=f"LSTM of {depth} layers, training: over torch's pipeline",
            rounds=per_round(pipeline, series[_in_waves(depth, TIME_BLOCK)]),
        ),
    ]
    return claims
