"""A wide MLP cut by its hidden dim over two devices, each a pinned core; torch's tensor parallelism beside it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import processes
from benchmarks.measure import Claim, Result, Series, Setting, fastest, median_step_s, per_round, time_in_turns
from benchmarks.processes import Process
from benchmarks.training import read_marks

TITLE = "MLP of 4 blocks 1024→4096→1024, batch 8, --mesh model=2 --layout hidden=model"
BARS = {"forward": 1.7, "training": 1.6}
FLAGS = ("--mesh", "model=2", "--layout", "hidden=model")
ONE, FUSED, TWO = "one device", "one device, fused optimizer", "2 devices, Paceline"
GLOO, SHARED = "2 devices, parallelize_module on Gloo", "2 devices, parallelize_module on Paceline's backend"


@dataclass(frozen=True)
class Net:
    """What the scripts compute, and for how long."""

    name: str
    width: int
    hidden: int
    depth: int = 4
    batch_size: int = 8
    steps: int = 100
    warm_up: int = 10
    bars: bool = False

    def arguments(self, kind: str, times: Path) -> list[str]:
        given = {
            "width": self.width,
            "hidden": self.hidden,
            "depth": self.depth,
            "batch-size": self.batch_size,
            "steps": self.warm_up + self.steps,
            "times": times,
        }
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        return [*words, *(["--forward"] if kind == "forward" else [])]

    def contestants(self, kind: str) -> dict[str, Callable[[], float]]:
        """By name; each gives the median step in milliseconds."""
        arguments = partial(self.arguments, kind)
        ways: dict[str, Callable[[Path], Sequence[Process]]] = {
            ONE: lambda times: [processes.alone("wide_alone.py", arguments(times))],
            FUSED: lambda times: [processes.alone("wide_alone.py", [*arguments(times), "--fused"])],
            TWO: lambda times: [processes.paceline("wide_paceline.py", arguments(times), FLAGS)],
            GLOO: lambda times: self._torch("gloo", arguments(times)),
            SHARED: lambda times: self._torch("paceline", arguments(times)),
        }
        if kind == "forward":
            del ways[FUSED]
        return {self.named(kind, name): partial(self._time, start) for name, start in ways.items()}

    def _torch(self, backend: str, arguments: list[str]) -> list[Process]:
        return processes.ranks("wide_torch.py", [*arguments, "--backend", backend], 2)

    def _time(self, start: Callable[[Path], Sequence[Process]]) -> float:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            times = Path(folder) / "times"
            processes.run(start(times))
            return 1000 * median_step_s(read_marks(times), self.warm_up)

    def named(self, kind: str, who: str) -> str:
        return f"{self.name}, {kind}, {who}"

    def claims(self, series: Mapping[str, Series], kind: str) -> Iterable[Claim]:
        ones = [series[name] for who in (ONE, FUSED) if (name := self.named(kind, who)) in series]
        for who in (TWO, GLOO, SHARED):
            yield Claim(
                text=f"{self.name}, {kind}: {who}, over one device",
                rounds=per_round(fastest(ones), series[self.named(kind, who)]),
                at_least=BARS[kind] if self.bars and who == TWO else None,
            )


WIDE = Net("Wide MLP", 1024, 4096, bars=True)
SMALL = Net("Small MLP (64→128→64)", 64, 128, steps=300, warm_up=50)
SIZES = {
    "full": (WIDE, SMALL),
    "quick": (Net("Wide MLP", 512, 2048, steps=8, warm_up=3), Net("Small MLP (64→128→64)", 64, 128, steps=50)),
    "tiny": (Net("Tiny MLP", 8, 12, depth=1, steps=2, warm_up=1),),
}


def run(setting: Setting) -> Result:
    nets = SIZES[setting.scale]
    contestants = {
        name: contestant for net in nets for kind in BARS for name, contestant in net.contestants(kind).items()
    }
    series = time_in_turns(contestants, setting, "ms")
    return Result(
        title=TITLE,
        series=tuple(series.values()),
        claims=tuple(claim for net in nets for kind in BARS for claim in net.claims(series, kind)),
        notes=(
            "The small MLP shows where cutting does not pay: its step is shorter than what devices take to meet.",
            "parallelize_module is torch's own, each first layer Colwise and each second Rowwise; on Paceline's "
            "backend (`paceline.torch_backend`) its collectives go through shared memory, and the dispatch of DTensor "
            "stays.",
        ),
    )
