"""What a search adds to a trial, beyond a process that starts Python and imports torch.

The trials do next to nothing, so that hardly anything else is in the figures. A search of some trials is compared with
one of more, and what the additional ones take with bare processes of the same script, one after the other, which have
all that a trial has but a search: its values, its folder, and torch's compiler loaded late as by every replica. So what
a search loads once is not in it; it is told beside it.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.measure import Claim, Result, Setting, per_round, time_in_turns
from benchmarks.trials import finish, timed
from paceline.trial_values import TRIAL_VARIABLE, TrialPlace

TITLE = "Seconds for trials that do next to nothing"
SCRIPT = str(Path(__file__).parent / "scripts" / "short_trial.py")
MOST_MS = 20.0


@dataclass(frozen=True)
class Size:
    few: int
    more: int  # beyond these


SIZES = {"full": Size(4, 12), "quick": Size(2, 3), "tiny": Size(1, 1)}


def run(setting: Setting) -> Result:
    size = SIZES[setting.scale]
    few, many = (f"paceline tune, {count} trials" for count in (size.few, size.few + size.more))
    bare, plain = (f"{size.more} {how}" for how in ("bare processes", "processes of plain python"))
    contestants: dict[str, Callable[[], float]] = {
        few: partial(_tune, size.few),
        many: partial(_tune, size.few + size.more),
        bare: partial(_processes, size.more, ["-m", "paceline.launch.script", SCRIPT]),
        plain: partial(_processes, size.more, [SCRIPT]),
    }
    series = time_in_turns(contestants, setting, "s")
    rounds = zip(series[few].rounds, series[many].rounds, series[bare].rounds, strict=True)
    added = [(1000 * (b - a - alone) / size.more, a - size.few * alone / size.more) for a, b, alone in rounds]
    overhead_ms, once_s = (statistics.median(column) for column in zip(*added, strict=True))
    spread = f"{min(ms for ms, _ in added):.0f} to {max(ms for ms, _ in added):.0f}"
    note = (
        f"A trial takes {overhead_ms:+.0f} ms ({spread}) more than a bare process (wanted: at most {MOST_MS:.0f}; "
        f"below 0 it takes less, since torch is loaded once for all), and a search {once_s:+.1f} s once."
    )
    setting.say(note)
    return Result(
        title=TITLE,
        series=tuple(series.values()),
        claims=(
            Claim(
                text=f"what a search adds to a trial, over {MOST_MS:.0f} ms",
                rounds=tuple(ms / MOST_MS for ms, _ in added),
                at_most=1.0,
            ),
            Claim(
                text="a trial started as replicas are over plain python", rounds=per_round(series[bare], series[plain])
            ),
        ),
        notes=(note,),
    )


def _tune(trials: int) -> float:
    def search(folder: Path) -> None:
        flags = ["--param", f"x=0..{trials}", "--trials", str(trials), "--sampler", "grid", "--maximize", "score"]
        finish(["-m", "paceline", "tune", SCRIPT, *flags, "--folder", str(folder / "out"), "--json"], folder)

    return timed(search)


def _processes(count: int, command: list[str]) -> float:
    def all_of_them(folder: Path) -> None:
        for number in range(count):
            trial = TrialPlace(number=number, parameters={"x": number}, folder=str(folder), metric="score")
            finish(command, folder, {**os.environ, TRIAL_VARIABLE: msgspec.json.encode(trial).decode()})

    return timed(all_of_them)
