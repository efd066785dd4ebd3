"""An embedding of 10M rows of which a step touches 4,096: does a step cost what it touches, or what there is?

Counted are the time of a step and the bytes that a replica sends and receives over TCP in it, as the kernel counts
them. The bytes are held against those of the touched rows with `--exchange tcp`, as between hosts.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks import processes
from benchmarks.measure import Claim, Result, Series, Setting, per_round, take_turns
from benchmarks.processes import Process

TITLE = "Embedding of 10M × 16, 4,096 rows touched a step, 2 replicas, 1 server"
REPLICAS = 2
WIDTH = 16
MOST_TIME = 1.3
MOST_BYTES = 1.3
SHARED, TCP, DDP_SPARSE, DDP_DENSE = (
    "Paceline, shared memory",
    "Paceline, TCP",
    "DDP, sparse gradients",
    "DDP, dense gradients",
)


@dataclass(frozen=True)
class Cost:
    """Of a median step."""

    ms: float
    bytes: float


@dataclass(frozen=True)
class Size:
    rows: dict[str, int]  # by name: the small table, the large one
    touched: int
    steps: int
    dense_steps: int
    warm_up: int

    @property
    def least_bytes(self) -> int:
        """What one replica must send and receive in a step: its rows there and back, and which they are, twice."""
        return 2 * self.touched // REPLICAS * (4 * WIDTH + 8)

    def cost(self, rows: int, start: Callable[[list[str]], Sequence[Process]]) -> Cost:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            times = Path(folder) / "times"
            given = {"rows": rows, "touched": self.touched, "steps": self.warm_up + self.steps, "times": times}
            processes.run(start([word for name, value in given.items() for word in (f"--{name}", str(value))]))
            marks = [tuple(map(float, line.split())) for line in times.read_text().splitlines()][self.warm_up - 1 :]
            each = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks)]
            return Cost(1000 * statistics.median(s for s, _ in each), statistics.median(count for _, count in each))

    def paceline(self, rows: int, *flags: str) -> Cost:
        flags = ("--replicas", str(REPLICAS), "--servers", "1", *flags)
        return self.cost(rows, lambda arguments: [processes.paceline("rows_paceline.py", arguments, flags)])

    def ddp(self, rows: int, *options: str) -> Cost:
        size = self if options else replace(self, steps=self.dense_steps)
        return size.cost(rows, lambda arguments: processes.ranks("rows_ddp.py", [*arguments, *options], REPLICAS))


SIZES = {
    "full": Size({"100k rows": 100_000, "10M rows": 10_000_000}, touched=4096, steps=60, dense_steps=4, warm_up=5),
    "quick": Size({"100k rows": 100_000, "1M rows": 1_000_000}, touched=4096, steps=20, dense_steps=4, warm_up=3),
    "tiny": Size({"1k rows": 1_000, "5k rows": 5_000}, touched=128, steps=4, dense_steps=2, warm_up=2),
}


def run(setting: Setting) -> Result:
    size = SIZES[setting.scale]
    ways: dict[str, Callable[[int], Cost]] = {
        SHARED: size.paceline,
        TCP: lambda rows: size.paceline(rows, "--exchange", "tcp"),
        DDP_SPARSE: lambda rows: size.ddp(rows, "--sparse"),
        DDP_DENSE: size.ddp,
    }
    runs = {f"{way}, {table}": partial(start, rows) for way, start in ways.items() for table, rows in size.rows.items()}
    given = take_turns(runs, setting, lambda cost: f"{cost.ms:.1f} ms and {cost.bytes / 1e6:.3f} MB a step")
    times = {name: Series(name, "ms a step", tuple(cost.ms for cost in costs)) for name, costs in given.items()}
    sent = {
        name: Series(name, "MB a step over TCP", tuple(cost.bytes / 1e6 for cost in costs))
        for name, costs in given.items()
    }
    small, large = size.rows
    claims = [
        Claim(
            text=f"Embedding, {way}: step with {large} over that with {small}",
            rounds=per_round(times[f"{way}, {large}"], times[f"{way}, {small}"]),
            at_most=MOST_TIME if way in (SHARED, TCP) else None,
        )
        for way in ways
    ]
    claims.append(
        Claim(
            text="Embedding, TCP: bytes a step over those of the rows and their numbers, there and back",
            rounds=tuple(1e6 * mb / size.least_bytes for mb in sent[f"{TCP}, {large}"].rounds),
            at_most=MOST_BYTES,
        )
    )
    claims += [
        Claim(
            text=f"Embedding of {large}: step of {way} over Paceline's, shared memory",
            rounds=per_round(times[f"{way}, {large}"], times[f"{SHARED}, {large}"]),
        )
        for way in (DDP_SPARSE, DDP_DENSE)
    ]
    return Result(title=TITLE, series=(*times.values(), *sent.values()), claims=tuple(claims))
