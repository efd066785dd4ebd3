"""What a step costs with many light replicas on four servers, as threads of one process and as processes.

There are far more replicas than cores, so a step cannot take less than all their computing: what is to be seen is that
the cost grows with their number, and not with its square.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks import processes
from benchmarks.measure import Claim, Curve, Plot, Result, Setting, Skipped, per_round, time_in_turns
from benchmarks.training import Training
from paceline.cli.checks import REPLICA_BYTES
from paceline.machine import free_memory

TITLE = "Light replicas on 4 servers: step cost by their number"
SERVERS = 4
THREADS, PROCESSES = "threads (--in-graph)", "processes"


@dataclass(frozen=True)
class Size:
    training: Training
    threads: tuple[int, ...]
    processes: tuple[int, ...]
    servers: int = SERVERS


_LIGHT = Training("mlp", 64, 1, batch_size=4, steps=30, warm_up=5)
SIZES = {
    "full": Size(_LIGHT, threads=(1, 10, 25, 50, 100), processes=(1, 5, 10, 20)),
    "quick": Size(Training("mlp", 64, 1, batch_size=4, steps=10, warm_up=3), threads=(1, 10, 50), processes=(1, 4)),
    "tiny": Size(Training("mlp", 8, 1, batch_size=2, steps=3, warm_up=2), threads=(1, 4), processes=(2,), servers=2),
}


def run(setting: Setting) -> Result:
    size = SIZES[setting.scale]
    _check_memory(size)
    flags = ("--servers", str(size.servers))
    contestants: dict[tuple[str, int], Callable[[], float]] = {
        **{(THREADS, count): partial(size.training.replicas, count, *flags, "--in-graph") for count in size.threads},
        **{(PROCESSES, count): partial(size.training.replicas, count, *flags) for count in size.processes},
    }
    series = time_in_turns({_named(*key): start for key, start in contestants.items()}, setting, "ms a step")
    few, many = size.threads[min(1, len(size.threads) - 2)], size.threads[-1]
    claims = [
        Claim(
            text=f"{many} replicas: step cost a replica over that of {few}",
            rounds=per_round(series[_named(THREADS, many)], series[_named(THREADS, few)], times=few / many),
        )
    ]
    curves = tuple(
        Curve(kind, tuple((float(count), series[_named(kind, count)].median) for count in counts))
        for kind, counts in ((THREADS, size.threads), (PROCESSES, size.processes))
    )
    return Result(
        title=TITLE,
        series=tuple(series.values()),
        claims=tuple(claims),
        plot=Plot(x="replicas", y="ms a step", curves=curves, log=True),
    )


def _named(kind: str, count: int) -> str:
    return f"{count} replicas, {kind}"


def _check_memory(size: Size) -> None:
    if not processes.knows("run", "--in-graph"):
        raise Skipped("`paceline run` has no --in-graph")
    need = (max(size.processes) + size.servers + 2) * REPLICA_BYTES
    if free_memory() < need:
        raise Skipped(f"{max(size.processes)} processes need {need / 2**30:.1f} GiB, which are not free")
