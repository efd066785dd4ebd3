"""`python -m benchmarks.saturation`: published scaling figures beside what the simulator of `paceline.plan` gives.

Writes `docs/saturation.md` and its pictures. Machines are described by as few numbers as possible; which published
points those were fitted to stands with each picture, and everything else in it is predicted.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks import straggler
from benchmarks.saturation_charts import Backups, Chart, Inception, NullSteps, OwnRuns, SpeedUps
from benchmarks.saturation_page import write_page
from paceline.plan.compute_times import ComputeTimes, Fixed, Stragglers
from paceline.plan.servers_step import servers_step
from paceline.plan.simulate import Simulated, simulate
from paceline.plan.step import StepCost
from paceline.rules import Async, Rule, Sync

DOCS = Path(__file__).parent.parent / "docs"
MB, GB = 1e6, 1e9

# What was published, and how sure it is, is in the page. Seconds by number of workers.
SCALAR_S = {1: 1.8e-3, 100: 8.8e-3}
DENSE_100MB_S = {1: 0.147, 100: 0.613}
DENSE_1GB_S = {1: 1.01, 100: 7.16}
SPARSE_S = (5e-3, 20e-3)
NULL_SERVERS = 16
BACKUPS_FASTEST, FASTEST_S = 4, 1.93
BACKUPS_BEST, BEST_GAIN = 3, 0.095
INCEPTION_SERVERS, INCEPTION_BYTES = 17, 95 * MB  # 23.8 million parameters of four bytes
INCEPTION_BATCH = 32  # images of a worker: assumed
IMAGES_PER_S = {200: 2300.0}
SPEED_UPS = {"NMT": (8, 6.0), "Inception": (50, 32.0), "Inception, April 2016": (100, 56.0), "RankBrain": (500, 300.0)}
DENSE_ON_50 = (25.0, 40.0)

# Assumed of how long a turn takes: nearly all turns are alike, and a few are longer, none very much.
BODY_SPREAD, TAIL = 0.01, 16.0


@dataclass(frozen=True)
class Cluster:
    """Machines as the simulator sees them."""

    link: float  # bytes a second, each way, of a worker and of a server
    message_s: float  # that a server spends on a message of a worker
    fixed_s: float  # of a step that has nothing to do
    times: ComputeTimes

    def step(
        self,
        compute_s: float,
        size: float,
        workers: int,
        servers: int,
        *,
        rule: Rule | None = None,
        steps: int = 30,
        push: bool = True,
        times: ComputeTimes | None = None,
    ) -> Simulated:
        """Returns a run in which every worker pulls and pushes so many bytes; gradients go when all are there."""
        step = servers_step(
            StepCost.whole(compute_s + self.fixed_s, size),
            replicas=workers,
            servers=servers,
            link=self.link,
            rule=rule,
            message_s=self.message_s,
            push_bytes=None if push else 0.0,
            bucket_bytes=math.inf,
        )
        return simulate(step, times=times or self.times, steps=steps)


def solve(function: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Returns where a growing function has this value, by halving on a scale of ratios."""
    while high / low > 1 + 1e-4:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return math.sqrt(low * high)


# ── 16 servers that do nothing but answer ────────────────────────────────────────────────────────────────


def null_cluster() -> Cluster:
    """Returns the machines: two numbers from the scalar's two points, one from 1 GB and one worker."""

    def of(message_s: float, link: float) -> Cluster:
        return Cluster(link, message_s, SCALAR_S[1] - 2 * message_s, Fixed())

    link = GB / (DENSE_1GB_S[1] - SCALAR_S[1])
    message_s = solve(
        lambda message_s: of(message_s, link).step(0, 4 * NULL_SERVERS, 100, NULL_SERVERS, push=False).step_s,
        SCALAR_S[100],
        1e-6,
        5e-4,
    )
    return of(message_s, link)


def null_steps(cluster: Cluster) -> NullSteps:
    workers = [1, 2, 5, 10, 16, 25, 50, 75, 100]
    sizes = {"scalar": 4.0 * NULL_SERVERS, "dense, 100 MB": 100 * MB, "dense, 1 GB": GB}
    ours = {
        name: [cluster.step(0, size, count, NULL_SERVERS, push=False).step_s for count in workers]
        for name, size in sizes.items()
    }
    theirs = dict(zip(sizes, (SCALAR_S, DENSE_100MB_S, DENSE_1GB_S), strict=True))
    return NullSteps(workers, ours, theirs, SPARSE_S, cluster.link, cluster.message_s, cluster.fixed_s)


# ── backup workers ───────────────────────────────────────────────────────────────────────────────────────


def straggling(cluster: Cluster) -> tuple[Stragglers, float]:
    """Returns how turns straggle and how long a turn computes, so that 50 + b workers do what was published.

    Which share of turns is slow, and by how much at least, comes from the gain of three, and from three being best and
    four fastest; the seconds from the step with four.
    """

    def steps_s(times: Stragglers, compute_s: float, spares: Sequence[int], steps: int) -> list[float]:
        return [_inception_step(cluster, compute_s, 50 + b, Sync(50), steps, times).step_s for b in spares]

    def miss(times: Stragglers, steps: int) -> float:
        found = steps_s(times, 1.33, spares, steps)
        gains = [found[0] / step_s * 50 / (50 + b) - 1 for b, step_s in zip(spares, found, strict=True)]
        not_best = max(gains) - gains[spares.index(BACKUPS_BEST)]
        not_fastest = 1 - min(found) / found[spares.index(BACKUPS_FASTEST)]
        return abs(gains[spares.index(BACKUPS_BEST)] - BEST_GAIN) + not_best + not_fastest

    spares = (0, 2, 3, 4, 5)
    chances, leasts = (0.015, 0.02, 0.025, 0.03, 0.035), (1.3, 1.35, 1.4, 1.45, 1.5)
    grid = [Stragglers(BODY_SPREAD, chance, least, TAIL) for chance in chances for least in leasts]
    likely = sorted(grid, key=lambda times: miss(times, 150))[:5]
    best = min(likely, key=lambda times: miss(times, 800))
    compute_s = solve(lambda seconds: steps_s(best, seconds, (BACKUPS_FASTEST,), 100)[0], FASTEST_S, 0.5, 3.0)
    return best, compute_s


def _inception_step(
    cluster: Cluster, compute_s: float, workers: int, rule: Rule, steps: int, times: ComputeTimes | None = None
) -> Simulated:
    return cluster.step(compute_s, INCEPTION_BYTES, workers, INCEPTION_SERVERS, rule=rule, steps=steps, times=times)


def backups(cluster: Cluster, times: Stragglers, compute_s: float) -> Backups:
    spares = list(range(8))
    of_50 = [_inception_step(cluster, compute_s, 50 + b, Sync(50), 400).step_s for b in spares]
    of_100 = [_inception_step(cluster, compute_s, 100, Sync(100 - b), 200) for b in range(13)]
    to_converge = [100 * run.step_s / (100 - b) for b, run in enumerate(of_100)]
    return Backups(
        spares,
        of_50,
        [of_50[0] / step_s * 50 / (50 + b) - 1 for b, step_s in zip(spares, of_50, strict=True)],
        list(range(13)),
        [run.step_s for run in of_100],
        [seconds / to_converge[0] for seconds in to_converge],
        times,
        compute_s,
        (BACKUPS_FASTEST, FASTEST_S),
        (BACKUPS_BEST, BEST_GAIN),
    )


# ── Inception-v3 on 17 servers, and speed-ups ────────────────────────────────────────────────────────────


def inception(cluster: Cluster, compute_s: float) -> Inception:
    workers = [1, 10, 25, 50, 75, 100, 150, 200]
    rules: dict[str, Rule] = {"sync": Sync(), "async": Async()}
    runs = {
        name: [_inception_step(cluster, compute_s, count, rule, max(30, 4000 // count)) for count in workers]
        for name, rule in rules.items()
    }
    return Inception(
        workers,
        {name: [run.turns_per_s * INCEPTION_BATCH for run in found] for name, found in runs.items()},
        {name: [run.turns_per_s * compute_s for run in found] for name, found in runs.items()},
        IMAGES_PER_S,
        {count: speed_up for name, (count, speed_up) in SPEED_UPS.items() if name.startswith("Inception")},
        {name: found[-1].path for name, found in runs.items()},
        compute_s,
        INCEPTION_BATCH,
    )


def speed_ups(cluster: Cluster) -> SpeedUps:
    """Solves for how long a turn has to compute for a published speed-up; the rest of each curve is predicted."""

    def speed_up(compute_s: float, size: float, workers: int, rule: Rule) -> float:
        steps = max(10, 4000 // workers)  # stragglers are few
        return cluster.step(compute_s, size, workers, NULL_SERVERS, rule=rule, steps=steps).turns_per_s * compute_s

    def dense(size: float, workers: int, wanted: float) -> float:
        return solve(lambda compute_s: speed_up(compute_s, size, workers, Sync()), wanted, 1e-3, 1e3)

    size = 100 * MB  # of any size: what counts is seconds of computing for each second on a link
    solved = {name: dense(size, *SPEED_UPS[name]) for name in ("NMT", "Inception")}
    rows = 0.1 * MB
    workers, wanted = SPEED_UPS["RankBrain"]
    sparse_s = solve(lambda compute_s: speed_up(compute_s, rows, workers, Async()), wanted, 1e-3, 10)
    few, many = [1, 2, 4, 8, 16, 25, 50, 100, 200], [1, 8, 50, 100, 200, 350, 500, 700, 1000]

    def curve(compute_s: float, of: float, counts: Sequence[int], rule: Rule) -> list[tuple[int, float]]:
        return [(count, speed_up(compute_s, of, count, rule)) for count in counts]

    return SpeedUps(
        {name: curve(compute_s, size, few, Sync()) for name, compute_s in solved.items()},
        curve(sparse_s, rows, many, Async()),
        {name: compute_s / (size / cluster.link) for name, compute_s in solved.items()},
        sparse_s,
        rows,
        SPEED_UPS,
        DENSE_ON_50,
        speed_up(1.0, 0.0, 50, Sync()),
    )


# ── our own runs ─────────────────────────────────────────────────────────────────────────────────────────


def own_runs(folder: Path) -> OwnRuns:
    """Four replicas, one of them slow, as `benchmarks straggler` has measured them, and what the simulator makes of it.

    One number is fitted: what a step of three healthy replicas takes beyond its samples' sleep.
    """
    series = msgspec.json.decode((folder / "benchmarks.json").read_bytes())["results"]["straggler"]["result"]["series"]
    measured = {one["name"]: statistics.median(one["rounds"]) for one in series}
    size, healthy = straggler.SIZES["full"], straggler.REPLICAS - 1
    sleep_s = size.sleep_ms / 1000
    beyond_s = size.batch_size / measured[straggler.HEALTHY] - size.batch_size / healthy * sleep_s

    def samples_per_s(replicas: int, parts: int, rule: Rule) -> float:
        samples = size.batch_size / parts
        step = servers_step(
            StepCost.whole(samples * sleep_s, 0),
            replicas=replicas,
            servers=1,
            rule=rule,
            latency_s=beyond_s / 5,  # two ways of a pull, one of a push, two of an answer
        )
        slow = {straggler.STRAGGLER: straggler.FACTOR} if replicas == straggler.REPLICAS else {}
        return simulate(step, slow=slow, steps=200).turns_per_s * samples

    ours = {
        straggler.HEALTHY: samples_per_s(healthy, healthy, Sync()),
        straggler.ACCEPT: samples_per_s(healthy + 1, healthy, Sync(healthy)),
        "plain sync": samples_per_s(healthy + 1, healthy + 1, Sync()),
        "async": samples_per_s(healthy + 1, healthy, Async()),
    }
    return OwnRuns({name: (measured[name], found) for name, found in ours.items()}, beyond_s)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saturation", description=__doc__)
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="FOLDER", help="where the page goes, default docs")
    folder = parser.parse_args(arguments).docs
    cluster = null_cluster()
    times, compute_s = straggling(cluster)
    slow = Cluster(cluster.link, cluster.message_s, 0.0, times)
    chart = Chart(folder)
    page = write_page(
        chart,
        null_steps(cluster),
        backups(slow, times, compute_s),
        inception(slow, compute_s),
        speed_ups(slow),
        own_runs(DOCS),
    )
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
