"""Six 3×3 convolutions on images of 224×224, cut by rows over two devices, each a pinned core, against one of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import processes
from benchmarks.measure import Claim, Result, Series, Setting, median_step_s, per_round, take_turns, time_in_turns
from benchmarks.processes import Failed, Process
from benchmarks.training import read_marks

TITLE = "Six 3×3 convolutions on 224×224 images, --tiles 2"
BARS = {"forward": 1.7, "training": 1.6}
ALONE, TILES = "one device", "2 devices, --tiles 2"
MB = 1e6


@dataclass(frozen=True)
class Size:
    """What the scripts compute, and for how long."""

    size: int = 224
    width: int = 32
    depth: int = 6
    batch_sizes: tuple[int, ...] = (1, 4)
    steps: int = 12
    warm_up: int = 3

    def arguments(self, batch_size: int, kind: str, times: Path) -> list[str]:
        given = {
            "size": self.size,
            "width": self.width,
            "depth": self.depth,
            "batch-size": batch_size,
            "steps": self.warm_up + self.steps,
            "times": times,
            "memory": times.with_name("memory"),
        }
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        return [*words, *(["--forward"] if kind == "forward" else [])]

    # ── contestants ──────────────────────────────────────────────────────────────────────────────────────

    def alone(self, batch_size: int, kind: str, read: Callable[[Path], float]) -> float:
        """Plain torch, on what one of the two devices has."""
        start = lambda times: processes.alone("images_alone.py", self.arguments(batch_size, kind, times))  # noqa: E731
        return self._run(start, read)

    def tiles(self, batch_size: int, kind: str, read: Callable[[Path], float]) -> float:
        arguments = partial(self.arguments, batch_size, kind)
        return self._run(
            lambda times: processes.paceline("images_paceline.py", arguments(times), ["--tiles", "2"]), read
        )

    def _run(self, start: Callable[[Path], Process], read: Callable[[Path], float]) -> float:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            times = Path(folder) / "times"
            processes.run([start(times)])
            return read(times)

    # ── what they are held to ────────────────────────────────────────────────────────────────────────────

    def step_ms(self, times: Path) -> float:
        return 1000 * median_step_s(read_marks(times), self.warm_up)

    @staticmethod
    def memory_mb(times: Path) -> float:
        """Of the process that took most."""
        found = [int(path.read_text()) for path in times.parent.glob("memory-*")]
        if not found:
            raise Failed("no process has said how much memory it took")
        return max(found) / MB


SIZES = {
    "full": Size(),
    "quick": Size(size=96, width=16, batch_sizes=(1,), steps=5, warm_up=2),
    "tiny": Size(size=16, width=2, depth=2, batch_sizes=(1,), steps=2, warm_up=1),
}


def run(setting: Setting) -> Result:
    size = SIZES[setting.scale]
    contestants = {
        _named(kind, batch, who): partial(how, batch, kind, size.step_ms)
        for kind in BARS
        for batch in size.batch_sizes
        for who, how in ((ALONE, size.alone), (TILES, size.tiles))
    }
    series = time_in_turns(contestants, setting, "ms")
    claims = [
        Claim(
            text=f"Convolutions, {kind}, batch {batch}: two devices over one",
            rounds=per_round(series[_named(kind, batch, ALONE)], series[_named(kind, batch, TILES)]),
            at_least=bar,
        )
        for kind, bar in BARS.items()
        for batch in size.batch_sizes
    ]
    memory, of_memory = _memory(size, setting)
    return Result(
        title=TITLE,
        series=(*series.values(), *memory),
        claims=(*claims, of_memory),
        notes=(
            "Memory is the highest of a device's process while it trains, beyond what it had with the data loaded and "
            "the model made: activations and their gradients, above all.",
        ),
    )


def _named(kind: str, batch: int, who: str) -> str:
    return f"{kind}, batch {batch}, {who}"


def _memory(size: Size, setting: Setting) -> tuple[Sequence[Series], Claim]:
    batch = size.batch_sizes[-1]
    ways = {ALONE: size.alone, TILES: size.tiles}
    runs = take_turns(
        {who: partial(how, batch, "training", size.memory_mb) for who, how in ways.items()},
        setting,
        lambda megabytes: f"{megabytes:,.0f} MB",
    )
    alone, tiles = (Series(f"memory a device, training, batch {batch}, {who}", "MB", tuple(runs[who])) for who in ways)
    claim = Claim(
        text=f"Convolutions, batch {batch}: memory a device over one device's", rounds=per_round(tiles, alone)
    )
    return (alone, tiles), claim
