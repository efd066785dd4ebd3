"""How long a user waits from Enter to the end of the first step."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import processes
from benchmarks.measure import Claim, Result, Setting, per_round, time_in_turns
from benchmarks.processes import Process
from benchmarks.training import Training, read_marks

TITLE = "Seconds from the command to the end of the first step"
TRAINING = Training("mlp", 256, 2, batch_size=32, steps=2, warm_up=1)


@dataclass(frozen=True)
class Size:
    replicas: tuple[int, ...]


SIZES = {"full": Size((2, 4)), "quick": Size((2, 4)), "tiny": Size((2,))}


def run(setting: Setting) -> Result:
    counts = SIZES[setting.scale].replicas
    contestants = {}
    for count in counts:
        contestants[f"{count} replicas, paceline run"] = partial(_paceline, count)
        contestants[f"{count} replicas, torchrun and DDP"] = partial(_torchrun, count)
    series = time_in_turns(contestants, setting, "s")
    claims = [
        Claim(
            text=f"Start of {count} replicas: torchrun's time over paceline run's",
            rounds=per_round(series[f"{count} replicas, torchrun and DDP"], series[f"{count} replicas, paceline run"]),
        )
        for count in counts
    ]
    return Result(title=TITLE, series=tuple(series.values()), claims=tuple(claims))


def _paceline(count: int) -> float:
    flags = ["--replicas", str(count)]
    return _first_step_s(lambda times: processes.paceline("train_paceline.py", TRAINING.arguments(times), flags))


def _torchrun(count: int) -> float:
    return _first_step_s(lambda times: processes.torchrun("train_ddp.py", TRAINING.arguments(times), count))


def _first_step_s(start: Callable[[Path], Process]) -> float:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        times = Path(folder) / "times"
        began = time.monotonic()
        processes.run([start(times)])
        return read_marks(times)[0] - began
