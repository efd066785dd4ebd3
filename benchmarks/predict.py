"""Single requests to a model that `pl.load` cuts over two devices: how long one takes, against one pinned core."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import processes
from benchmarks.measure import Claim, Result, Setting, median_step_s, per_round, time_in_turns
from benchmarks.processes import Process
from benchmarks.training import read_marks

TITLE = "Single requests to a cut model"
MOST = 0.55  # of one device's time
ONE, TWO = "one device", "2 devices"


@dataclass(frozen=True)
class Asked:
    """A model, and how it is asked."""

    name: str
    model: str
    sizes: dict[str, int] = field(default_factory=dict)
    steps: int = 40
    warm_up: int = 10

    def arguments(self, devices: int, times: Path) -> list[str]:
        given = {**self.sizes, "devices": devices, "steps": self.warm_up + self.steps, "times": times}
        return [self.model, *(word for name, value in given.items() for word in (f"--{name}", str(value)))]

    def one(self) -> float:
        """On what one of the two devices has."""
        return self._time(lambda times: processes.alone("ask.py", self.arguments(1, times)))

    def two(self) -> float:
        """It pins its devices itself."""
        return self._time(lambda times: processes.alone("ask.py", self.arguments(2, times), of=1))

    def _time(self, start: Callable[[Path], Process]) -> float:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            times = Path(folder) / "times"
            processes.run([start(times)])
            return 1000 * median_step_s(read_marks(times), self.warm_up)

    def named(self, who: str) -> str:
        return f"{self.name}, {who}"


WIDE = {"width": 1024, "hidden": 4096, "depth": 4, "batch-size": 8}
IMAGES = {"size": 224, "width": 32, "depth": 6, "batch-size": 1}
SIZES = {
    "full": (
        Asked("Wide MLP, batch 8, layout hidden=model", "wide", WIDE),
        Asked("Six convolutions, 224×224, batch 1, tiles", "images", IMAGES),
    ),
    "quick": (
        Asked("Wide MLP, layout hidden=model", "wide", {**WIDE, "width": 512, "hidden": 2048}, steps=10, warm_up=5),
        Asked("Convolutions, tiles", "images", {**IMAGES, "size": 96, "width": 16}, steps=10, warm_up=5),
    ),
    "tiny": (Asked("Tiny MLP", "wide", {"width": 8, "hidden": 12, "depth": 1}, steps=2, warm_up=1),),
}


def run(setting: Setting) -> Result:
    asked = SIZES[setting.scale]
    contestants = {
        model.named(who): partial(how) for model in asked for who, how in ((ONE, model.one), (TWO, model.two))
    }
    series = time_in_turns(contestants, setting, "ms a request")
    claims = tuple(
        Claim(
            text=f"{model.name}: a request to two devices, of the time of one",
            rounds=per_round(series[model.named(TWO)], series[model.named(ONE)]),
            at_most=MOST if setting.scale == "full" else None,
        )
        for model in asked
    )
    notes = ("The caller is one of the two devices; a request's tensors go to the other through shared memory.",)
    return Result(title=TITLE, series=tuple(series.values()), claims=claims, notes=notes)
