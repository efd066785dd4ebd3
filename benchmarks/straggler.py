"""Four replicas of which one is five times slower: who waits for it, and who does not.

A sample costs a fixed sleep and next to no computing, so that four replicas do not fight for two cores. The measure is
what the three healthy replicas achieve by themselves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import processes
from benchmarks.measure import Claim, Result, Series, Setting, per_round, take_turns
from benchmarks.processes import Process

TITLE = "Four replicas, one of them 5× slower: samples/s"
REPLICAS, STRAGGLER, FACTOR = 4, 3, 5.0
HEALTHY, ACCEPT, AUTO = "3 healthy replicas", "--accept 3", "--accept auto"
LEAST = 0.9
FIND_WITHIN = 50  # steps
STAYED = 5  # steps


@dataclass(frozen=True)
class Step:
    """When a step of replica 0 ended, how many were closed by then, and how many samples it had in it."""

    at_s: float
    closed: int
    samples: int


@dataclass(frozen=True)
class Size:
    batch_size: int  # of 3 and of 4 replicas, so a multiple of 12
    sleep_ms: float  # a sample
    steps: int
    warm_up: int

    def run(self, start: Callable[[list[str]], Sequence[Process]], batch_size: int, steps: int) -> list[Step]:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            times = Path(folder) / "times"
            given = {
                "batch-size": batch_size,
                "steps": steps,
                "sleep-ms": self.sleep_ms,
                "factor": FACTOR,
                "times": times,
            }
            processes.run(start([word for name, value in given.items() for word in (f"--{name}", str(value))]))
            rows = (line.split() for line in times.read_text().splitlines())
            return [Step(float(at), int(closed), int(samples)) for at, closed, samples in rows]

    def paceline(self, replicas: int, *flags: str) -> list[Step]:
        """With as many samples an update as a step of the others, or in an async run as a replica's part of it."""
        parts = replicas - 1 if "--async" in flags else 1
        flags = ("--replicas", str(replicas), "--servers", "1", *flags)
        straggler = ["--straggler", str(STRAGGLER)] if replicas == REPLICAS else []
        return self.run(
            lambda arguments: [processes.paceline("slow_paceline.py", [*arguments, *straggler], flags)],
            self.batch_size // parts,
            (self.warm_up + self.steps) * parts,
        )

    def ddp(self) -> list[Step]:
        straggler = ["--straggler", str(STRAGGLER)]
        return self.run(
            lambda arguments: processes.ranks("slow_ddp.py", [*arguments, *straggler], REPLICAS),
            self.batch_size,
            self.warm_up + self.steps,
        )

    def samples_per_second(self, steps: Sequence[Step], batch_size: int) -> float:
        """After the warm-up, of all replicas."""
        after = [step for step in steps if step.closed >= self.warm_up * self.batch_size // batch_size]
        return (after[-1].closed - after[0].closed) * batch_size / (after[-1].at_s - after[0].at_s)

    def found_at(self, steps: Sequence[Step]) -> int:
        """After how many steps `auto` had come to the three healthy ones, and stayed: from there on a replica's part
        is a third of the batch. All of them, if it has not."""
        third, quarter = self.batch_size / (REPLICAS - 1), self.batch_size / REPLICAS
        is_third = [abs(step.samples - third) < (third - quarter) / 2 for step in steps]
        for number in range(len(steps) - STAYED):
            if all(is_third[number : number + STAYED]):
                return steps[number].closed
        return steps[-1].closed


SIZES = {
    "full": Size(batch_size=96, sleep_ms=2.0, steps=120, warm_up=30),
    "quick": Size(batch_size=96, sleep_ms=1.0, steps=60, warm_up=30),
    "tiny": Size(batch_size=12, sleep_ms=1.0, steps=10, warm_up=4),
}


def run(setting: Setting) -> Result:
    size = SIZES[setting.scale]
    runs: dict[str, Callable[[], list[Step]]] = {
        HEALTHY: partial(size.paceline, REPLICAS - 1),
        ACCEPT: partial(size.paceline, REPLICAS, "--accept", str(REPLICAS - 1)),
        AUTO: partial(size.paceline, REPLICAS, "--accept", "auto"),
        "async": partial(size.paceline, REPLICAS, "--async"),
        "plain sync": partial(size.paceline, REPLICAS),
        "DDP": size.ddp,
    }

    def rate(name: str, steps: Sequence[Step]) -> float:
        parts = REPLICAS - 1 if name == "async" else 1
        return size.samples_per_second(steps, size.batch_size // parts)

    given = take_turns(runs, setting, lambda steps: f"{len(steps)} steps in {steps[-1].at_s - steps[0].at_s:.1f} s")
    series = {
        name: Series(name, "samples/s", tuple(rate(name, steps) for steps in rounds)) for name, rounds in given.items()
    }
    found = Series("--accept auto came to 3 after", "steps", tuple(float(size.found_at(one)) for one in given[AUTO]))
    bars = {ACCEPT: LEAST}
    claims = [
        Claim(
            text=f"Straggler, {name}: samples/s over those of {HEALTHY}",
            rounds=per_round(series[name], series[HEALTHY]),
            at_least=bars.get(name),
        )
        for name in series
        if name != HEALTHY
    ]
    claims.append(
        Claim(
            text=f"Straggler, --accept auto: steps until it came to 3, over {FIND_WITHIN}",
            rounds=tuple(steps / FIND_WITHIN for steps in found.rounds),
            at_most=1.0,
        )
    )
    return Result(title=TITLE, series=(*series.values(), found), claims=tuple(claims))
