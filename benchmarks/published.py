"""Published models cut over two devices, each a pinned core, against one of them: GPT-2 of 8 blocks by a layout and by
stages, resnet18 by tiles; and how long it takes to find out how they are cut, the first time and the second."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import processes
from benchmarks.measure import Claim, Result, Setting, Skipped, median_step_s, per_round, time_in_turns
from benchmarks.processes import Process
from benchmarks.training import read_marks

TITLE = "GPT-2 of 8 blocks and resnet18, as published, over two devices"
PYTHON = Path(__file__).parent.parent / ".zoo" / "bin" / "python"
ONE = "one device"
WAYS: dict[str, tuple[str, Sequence[str], float]] = {
    "layout": ("gpt2", ["--mesh", "model=2", "--layout", "heads=model,hidden=model,vocab=model"], 1.6),
    "stages": ("gpt2", ["--stages", "2", "--micro-batches", "8"], 1.6),
    "tiles": ("resnet18", ["--tiles", "2"], 1.7),
}

CUTTING_S = {"first": 5.0, "second": 1.0}  # how long a run may take before its first step, by run


@dataclass(frozen=True)
class Size:
    """For how long the scripts train. Steps 1, 2, 4 … hold the loss against its graph; medians are of the others."""

    steps: int
    tiny: bool

    def arguments(self, model: str, times: Path) -> list[str]:
        return [model, "--steps", str(self.steps), "--times", str(times), *(["--tiny"] if self.tiny else [])]

    def alone(self, model: str) -> float:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            times = Path(folder) / "times"
            processes.run([self._process(processes.alone("published.py", [*self.arguments(model, times), "--plain"]))])
            return median_step_s(read_marks(times), 2)

    def cut(self, way: str, cache: Path, read: Callable[[Path], float]) -> float:
        """Returns what `read` finds in the folder of a run, where times are, too."""
        model, flags, _ = WAYS[way]
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            run = Path(folder) / "run"
            flags = [*flags, "--run-folder", str(run)]
            given = processes.paceline("published.py", self.arguments(model, Path(folder) / "times"), flags)
            processes.run([self._process(given, PACELINE_CACHE=str(cache))])
            return read(Path(folder))

    @staticmethod
    def _process(given: Process, **more: str) -> Process:
        """Returns a process with the packages of the zoo."""
        command = list(given.command)
        words = command[1:] if command[1] != "run" else ["-m", "paceline", *command[1:]]
        return Process([str(PYTHON), *words], given.cores, {**given.environment, **more})

    def steady(self, folder: Path) -> float:
        """Returns the median of the steps that hold nothing against anything."""
        marks = read_marks(folder / "times")
        return statistics.median(
            marks[step] - marks[step - 1] for step in range(3, self.steps + 1) if step & (step - 1)
        )

    def cutting(self, folder: Path) -> float:
        """Returns how long the run took to capture, prove and plan, of the device that took longest."""
        *_, ended = (folder / "run" / "events.jsonl").read_text().splitlines()
        return float(json.loads(ended)["cutting_s"])


SIZES = {"full": Size(7, tiny=False), "quick": Size(5, tiny=True), "tiny": Size(3, tiny=True)}


def run(setting: Setting) -> Result:
    if not PYTHON.exists():
        raise Skipped("it needs the packages of the zoo: make .zoo/.ready")
    size = SIZES[setting.scale]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        cache = Path(folder)
        models = dict.fromkeys(model for model, _, _ in WAYS.values())
        series = time_in_turns(
            {
                **{f"{model}, {ONE}": partial(size.alone, model) for model in models},
                **{way: partial(size.cut, way, cache / "kept", size.steady) for way in WAYS},
            },
            setting,
            "s a step",
        )
        graphs = [way for way in WAYS if way != "tiles"]
        when_of = {f"{way}, before the first step, {when} run": when for way in graphs for when in CUTTING_S}
        begins = {name: partial(size.cut, name.partition(",")[0], cache / name, size.cutting) for name in when_of}
        for name, when in when_of.items():
            if when == "second":
                begins[name]()  # the run before it
        firsts = time_in_turns(begins, Setting(setting.scale, 1, setting.say), "s")
    claims = [
        Claim(
            text=f"{model}, {way}: training step of one device over two",
            rounds=per_round(series[f"{model}, {ONE}"], series[way]),
            at_least=bar,
        )
        for way, (model, _, bar) in WAYS.items()
    ]
    claims += [
        Claim(
            text=f"gpt2, {name}: capture and planning, of the {CUTTING_S[when]:g} s that they may take",
            rounds=tuple(seconds / CUTTING_S[when] for seconds in firsts[name].rounds),
            at_most=1.0,
        )
        for name, when in when_of.items()
    ]
    notes = (
        "Batches of 8, of 128 words or images of 224×224; random weights, SGD, float32. Steps 1, 2, 4 … hold the loss "
        "against its graph and are left out of the medians. The first run captures the graph, proves it and measures "
        "it before its first step; the second has graph and measurements, and proves the graph again.",
    )
    return Result(title=TITLE, series=(*series.values(), *firsts.values()), claims=tuple(claims), notes=notes)
