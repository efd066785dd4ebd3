"""Step times of one workload under each way of training it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import processes
from benchmarks.measure import Setting, median_step_s
from benchmarks.processes import Process

# Ways to use DDP, of which the fastest is the peer, and one that is only shown.
_WAYS = {"DDP": (), "DDP, bucket view": ("--bucket-view",)}
DDP_FUSED = {"DDP, bucket view, fused optimizer": ("--bucket-view", "--fused")}


def ddp_ways(setting: Setting) -> dict[str, tuple[str, ...]]:
    """Options of the script by name: both ways, but for the tests."""
    return dict(list(_WAYS.items())[-1:]) if setting.scale == "tiny" else dict(_WAYS)


@dataclass(frozen=True)
class Training:
    """What the scripts train, and for how long. `batch_size` is a replica's, `steps` an epoch's."""

    model: str
    width: int
    depth: int
    batch_size: int
    steps: int
    warm_up: int
    optimizer: str = "sgd"
    epochs: int = 1

    def arguments(self, times: Path) -> list[str]:
        given = {
            "model": self.model,
            "width": self.width,
            "depth": self.depth,
            "optimizer": self.optimizer,
            "batch-size": self.batch_size,
            "steps": self.warm_up + self.steps,
            "epochs": self.epochs,
            "times": times,
        }
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]

    # ── ways to train it: each gives the median step time in milliseconds ────────────────────────────────

    def one_process(self) -> float:
        """Plain torch, on what one of two replicas has: one core of two."""
        return self.time(lambda times: [processes.alone("train_alone.py", self.arguments(times))])

    def one_replica(self) -> float:
        """`paceline run --replicas 1`, on the same."""
        flags = ["--replicas", "1"]
        return self.time(
            lambda times: [processes.paceline("train_paceline.py", self.arguments(times), flags, share_of=2)]
        )

    def apart(self, count: int) -> float:
        """As many plain processes at once as there would be replicas, which have nothing to do with one another:
        what the machine itself makes of `count` busy cores. The slowest one's step."""
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            times = [Path(folder) / str(number) for number in range(count)]
            processes.run(
                [
                    processes.alone("train_alone.py", self.arguments(path), number, count)
                    for number, path in enumerate(times)
                ]
            )
            return max(1000 * median_step_s(read_marks(path), self.warm_up) for path in times)

    def replicas(self, count: int, *flags: str) -> float:
        """`paceline run`."""
        flags = ("--replicas", str(count), *flags)
        return self.time(lambda times: [processes.paceline("train_paceline.py", self.arguments(times), flags)])

    def ddp(self, count: int, *options: str) -> float:
        """DistributedDataParallel on Gloo."""
        return self.time(lambda times: processes.ranks("train_ddp.py", [*self.arguments(times), *options], count))

    def time(self, start: Callable[[Path], Sequence[Process]]) -> float:
        """The median step of whatever `start(file for the times)` describes."""
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            times = Path(folder) / "times"
            processes.run(start(times))
            return 1000 * median_step_s(read_marks(times), self.warm_up)


def read_marks(times: Path) -> list[float]:
    """When each step ended, as far as a script that may still be running has written it down."""
    if not times.exists():
        return []
    whole_lines, _, _ = times.read_text().rpartition("\n")
    return [float(line) for line in whole_lines.splitlines()]
