"""Four async replicas on the digits, with a learning rate that stale gradients do not bear, and what helps.

One replica's gradient is computed on parameters that three others change meanwhile. With a moderate learning rate that
does no harm. With one that a sync run still likes, the delay makes it swing and not learn; weighing, correcting or
dropping stale gradients, a smaller factor, a bound or a warm-up are the remedies. A run whose loss ends up as not a
number has learned nothing, and has the accuracy of guessing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from benchmarks import processes
from benchmarks.measure import Claim, Curve, Plot, Result, Series, Setting, per_round, take_turns
from benchmarks.processes import Failed

TITLE = "Digits, 4 replicas: test accuracy with stale gradients"
REPLICAS = 4
MODERATE, LARGE = 0.5, 2.0  # learning rates
SYNC, PLAIN, SCALE, COMPENSATE = "sync", "plain async", "async, --stale scale", "async, --stale compensate"
SMALL_LR, EQUAL = f"plain async, lr {MODERATE:g}", f"plain async, lr {MODERATE:g}, no pauses"
WAYS = {
    SYNC: (),
    PLAIN: ("--async",),
    SCALE: ("--async", "--stale", "scale"),
    COMPENSATE: ("--async", "--stale", "compensate"),
    "async, --stale drop:2": ("--async", "--stale", "drop:2"),
    "async, --stale-lr 0.25": ("--async", "--stale-lr", "0.25"),
    "async, --bounded 1": ("--bounded", "1"),
    "async, --warmup-epochs 2": ("--async", "--warmup-epochs", "2"),
}
LEAST = 0.99  # of the sync accuracy: a point less
MOST_PLAIN = 0.95  # what is visible
STALENESS_WITHIN = 0.1
LAST = 5  # evaluations
DIVERGED = "it must be finite"  # what a run says whose loss is not a number
CHANCE = 0.1  # accuracy of what has learned nothing
IMAGES = 1500


class Found(msgspec.Struct, frozen=True):
    """What the script has written: accuracy by samples, gradients by staleness."""

    curve: tuple[tuple[float, float], ...]
    staleness: dict[int, int]

    @property
    def accuracy(self) -> float:
        """At the end: the median of the last evaluations, since a single one is off by a point now and then."""
        last = sorted(accuracy for _, accuracy in self.curve[-LAST:])
        return last[len(last) // 2]

    @property
    def mean_staleness(self) -> float:
        """Of a run that ended before it could tell, none."""
        counted = sum(self.staleness.values())
        return sum(steps * count for steps, count in self.staleness.items()) / counted if counted else 0.0


@dataclass(frozen=True)
class Size:
    epochs: int
    sleep_ms: float
    ways: tuple[str, ...]

    def train(self, lr: float, flags: tuple[str, ...], look_every: int = 1) -> Found:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            out = Path(folder) / "found.json"
            given = {
                "lr": lr,
                "epochs": self.epochs,
                "look-every": look_every,
                "sleep-ms": self.sleep_ms,
                "out": out,
            }
            arguments = [word for name, value in given.items() for word in (f"--{name}", str(value))]
            flags = ("--replicas", str(REPLICAS), "--servers", "1", *flags)
            try:
                processes.run([processes.paceline("train_digits.py", arguments, flags)])
            except Failed as failure:
                if DIVERGED not in str(failure):
                    raise
                return Found(((0, CHANCE), (self.epochs * IMAGES, CHANCE)), {})
            return msgspec.json.decode(out.read_bytes(), type=Found, strict=False)


SIZES = {
    "full": Size(epochs=30, sleep_ms=5.0, ways=tuple(WAYS)),
    "quick": Size(epochs=12, sleep_ms=5.0, ways=tuple(WAYS)),
    "tiny": Size(epochs=1, sleep_ms=2.0, ways=(SYNC, PLAIN, SCALE, COMPENSATE)),
}


def run(setting: Setting) -> Result:
    size = SIZES[setting.scale]
    runs: dict[str, Callable[[], Found]] = {name: partial(size.train, LARGE, WAYS[name]) for name in size.ways}
    runs[SMALL_LR] = partial(size.train, MODERATE, ("--async",))
    # An evaluation brings all to rest, and after it the first gradients are fresh: staleness is counted without. And
    # with gradients that take much longer than asking for the next one does: between its push and its next pull a
    # replica computes nothing that others could make stale.
    slower = replace(size, sleep_ms=10 * size.sleep_ms)
    runs[EQUAL] = partial(slower.train, MODERATE, ("--async",), look_every=size.epochs)
    given = take_turns(
        runs, setting, lambda found: f"{found.accuracy:.1%} accuracy, mean staleness {found.mean_staleness:.2f}"
    )
    series = {
        name: Series(name if name in (SMALL_LR, EQUAL) else f"{name}, lr {LARGE:g}", "accuracy", _accuracies(rounds))
        for name, rounds in given.items()
    }
    stale = Series("mean staleness", "steps", tuple(found.mean_staleness for found in given[EQUAL]))
    return Result(
        title=TITLE,
        series=(*series.values(), stale),
        claims=_claims(series, stale),
        plot=Plot(
            x="samples",
            y="test accuracy",
            curves=tuple(Curve(series[name].name, given[name][0].curve) for name in (*size.ways, SMALL_LR)),
        ),
    )


def _accuracies(rounds: list[Found]) -> tuple[float, ...]:
    return tuple(found.accuracy for found in rounds)


def _claims(series: dict[str, Series], stale: Series) -> tuple[Claim, ...]:
    best = Series("", "", tuple(map(max, zip(series[SCALE].rounds, series[COMPENSATE].rounds, strict=True))))
    expected = REPLICAS - 1
    return (
        Claim(
            text="Digits, large lr, async with scale or compensate: accuracy over that of sync",
            rounds=per_round(best, series[SYNC]),
            at_least=LEAST,
        ),
        Claim(
            text="Digits, large lr, plain async: accuracy over that of sync",
            rounds=per_round(series[PLAIN], series[SYNC]),
            at_most=MOST_PLAIN,
        ),
        Claim(
            text=f"Mean staleness of {REPLICAS} equal async replicas: off {expected}, over the 10 % that it may be",
            rounds=tuple(abs(mean / expected - 1) / STALENESS_WITHIN for mean in stale.rounds),
            at_most=1.0,
        ),
    )
