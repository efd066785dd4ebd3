"""The exchange alone: from the end of backward to `p.grad` being the mean, over two processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import processes
from benchmarks.measure import Claim, Result, Setting, median_exchange_s, per_round, time_in_turns
from benchmarks.processes import Process

TITLE = "All-reduce under pl.distribute and on Gloo, 2 processes"
BARS = {"100 MB": 4.0, "400 KB": 20.0}
RANKS = 2


@dataclass(frozen=True)
class Size:
    bytes: int
    repeats: int
    warm_up: int

    def time(self, start: Callable[[list[str]], Sequence[Process]]) -> float:
        """Milliseconds of one exchange, in the processes that `start(arguments)` describes."""
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            times = Path(folder) / "times"
            given = ["--bytes", self.bytes, "--repeats", self.warm_up + self.repeats, "--times", times]
            processes.run(start([str(word) for word in given]))
            ranks = [_read(times.with_name(f"times.{rank}")) for rank in range(RANKS)]
            return 1000 * median_exchange_s(ranks, self.warm_up)

    def paceline(self) -> float:
        flags = ["--replicas", str(RANKS)]
        return self.time(lambda arguments: [processes.paceline("reduce_paceline.py", arguments, flags)])

    def gloo(self) -> float:
        return self.time(lambda arguments: processes.ranks("reduce_gloo.py", arguments, RANKS))


SIZES = {
    "full": {
        "100 MB": Size(100_000_000, repeats=30, warm_up=5),
        "400 KB": Size(400_000, repeats=400, warm_up=50),
        "4 KB": Size(4_000, repeats=400, warm_up=50),
    },
    "quick": {
        "100 MB": Size(100_000_000, repeats=8, warm_up=2),
        "400 KB": Size(400_000, repeats=100, warm_up=20),
        "4 KB": Size(4_000, repeats=100, warm_up=20),
    },
    "tiny": {"4 KB": Size(4_000, repeats=3, warm_up=1)},
}


def run(setting: Setting) -> Result:
    sizes = SIZES[setting.scale]
    contestants = {}
    for name, size in sizes.items():
        contestants[f"{name}, Paceline"] = partial(size.paceline)
        contestants[f"{name}, Gloo"] = partial(size.gloo)
    series = time_in_turns(contestants, setting, "ms")
    claims = [
        Claim(
            text=f"All-reduce of {name}: times as fast as Gloo's",
            rounds=per_round(series[f"{name}, Gloo"], series[f"{name}, Paceline"]),
            at_least=BARS.get(name),
        )
        for name in sizes
    ]
    notes = [
        "Counted from the moment the last process has its gradient until all have the result. Paceline's is the mean, "
        "Gloo's the sum: dividing it is not counted."
    ]
    return Result(title=TITLE, series=tuple(series.values()), claims=tuple(claims), notes=tuple(notes))


def _read(times: Path) -> list[tuple[float, float]]:
    pairs = (line.split() for line in times.read_text().splitlines())
    return [(float(ready), float(done)) for ready, done in pairs]
