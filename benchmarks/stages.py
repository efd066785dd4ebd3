"""A transformer of 8 blocks cut by layer: two stages on two cores against one core, and torch's own pipeline."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks import processes
from benchmarks.measure import Claim, Result, Series, Setting, median_step_s, per_round, take_turns, time_in_turns
from benchmarks.processes import Process
from benchmarks.training import read_marks

TITLE = "Transformer of 8 blocks, 2 stages, 8 micro-batches"
LEAST_SPEEDUP = 1.6
MOST_MEMORY = 0.65  # of one device's: half, and micro-batches on their way
MB = 1e6


@dataclass(frozen=True)
class Size:
    width: int
    depth: int
    length: int
    batch_size: int
    micro_batches: int
    steps: int
    warm_up: int

    def arguments(self, steps: int, **files: Path) -> list[str]:
        given = {
            "width": self.width,
            "depth": self.depth,
            "length": self.length,
            "batch-size": self.batch_size,
            "micro-batches": self.micro_batches,
            "steps": steps,
            **files,
        }
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]

    # ── ways to train it, by the arguments of their scripts ──────────────────────────────────────────────

    def one(self, arguments: Sequence[str]) -> list[Process]:
        return [processes.alone("blocks_alone.py", arguments)]

    def stages(self, arguments: Sequence[str], *, schedule: str = "1f1b", cut_at: str | None = None) -> list[Process]:
        flags = ["--stages", "2", "--micro-batches", str(self.micro_batches), "--schedule", schedule]
        flags += ["--cut-at", cut_at] if cut_at is not None else []
        return [processes.paceline("blocks_paceline.py", arguments, flags)]

    def torch_pipeline(self, arguments: Sequence[str]) -> list[Process]:
        return processes.ranks("blocks_torch.py", arguments, 2)

    # ── what is measured ─────────────────────────────────────────────────────────────────────────────────

    def time(self, way: Way) -> float:
        """The median step, in milliseconds."""
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            times = Path(folder) / "times"
            processes.run(way(self, self.arguments(self.warm_up + self.steps, times=times)))
            return 1000 * median_step_s(read_marks(times), self.warm_up)

    def memory(self, way: Way) -> list[float]:
        """By device, the most it took at a time, in MB, beside Python and torch: beside what a tiny model takes."""
        idle = replace(self, width=16, length=4, batch_size=self.micro_batches)._memory(way)
        return [max(1, most - least) / MB for most, least in zip(self._memory(way), idle, strict=True)]

    def _memory(self, way: Way) -> list[int]:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            processes.run(way(self, self.arguments(self.warm_up + 1, memory=Path(folder) / "memory")))
            return [int(path.read_text()) for path in sorted(Path(folder).glob("memory-*"))]


Way = Callable[[Size, Sequence[str]], list[Process]]

SIZES = {
    "full": Size(width=256, depth=8, length=128, batch_size=32, micro_batches=8, steps=6, warm_up=2),
    "quick": Size(width=128, depth=8, length=32, batch_size=16, micro_batches=8, steps=5, warm_up=2),
    "tiny": Size(width=16, depth=2, length=4, batch_size=4, micro_batches=2, steps=2, warm_up=1),
}
ONE, CUT, PEER = "one device", "Paceline, 2 stages", "torch's pipeline on Gloo"


def run(setting: Setting) -> Result:
    size = SIZES[setting.scale]
    middle = f"blocks.{size.depth // 2}"
    ways: dict[str, Way] = {
        ONE: Size.one,
        CUT: Size.stages,
        f"{CUT}, cut at {middle}": partial(Size.stages, cut_at=middle),
        f"{CUT}, gpipe": partial(Size.stages, schedule="gpipe"),
        PEER: Size.torch_pipeline,
    }
    series = time_in_turns({name: partial(size.time, way) for name, way in ways.items()}, setting, "ms a step")
    held = take_turns(
        {name: partial(size.memory, way) for name, way in ways.items()},
        replace(setting, rounds=1),  # what is held does not depend on what else the machine does
        lambda devices: ", ".join(f"{device:,.0f} MB" for device in devices),
    )
    most = {name: Series(name, "MB", tuple(max(devices) for devices in rounds)) for name, rounds in held.items()}
    table = [
        Series(f"{name}, most memory of device {device}", "MB", tuple(devices[device] for devices in rounds))
        for name, rounds in held.items()
        for device in range(len(rounds[0]))
    ]
    claims = [
        Claim(
            text="Stages: training step of one device over two stages",
            rounds=per_round(series[ONE], series[CUT]),
            at_least=LEAST_SPEEDUP,
        ),
        *(
            Claim(text=f"Stages: the same for {name}", rounds=per_round(series[ONE], series[name]))
            for name in ways
            if name not in (ONE, CUT)
        ),
        Claim(
            text="Stages: most memory of a device, 1F1B, over one device's",
            rounds=per_round(most[CUT], most[ONE]),
            at_most=MOST_MEMORY,
        ),
        Claim(text=f"Stages: the same for {PEER}", rounds=per_round(most[PEER], most[ONE])),
    ]
    notes = [
        f"{size.depth} blocks of width {size.width}, {size.batch_size} samples of {size.length} words, "
        f"{size.micro_batches} micro-batches, SGD with momentum; each device is one core with one thread. With "
        f"{size.micro_batches} micro-batches two stages can be {2 * size.micro_batches / (size.micro_batches + 1):.2f} "
        "times as fast as one device at most.",
        "Unless it says otherwise the model is cut by measured cost; torch's pipeline is cut in the middle. Memory is "
        "PSS at its peak, without mapped files, less that of a tiny model.",
    ]
    return Result(title=TITLE, series=(*series.values(), *table), claims=tuple(claims), notes=tuple(notes))
