"""Local steps on a link of 100 Mbit/s: time to what sync reaches, on the digits and on a small transformer.

Two emulated hosts of one replica. The digits until the test accuracy is 0.97. A transformer of 1.4M parameters on
characters of texts that come with Python: sync makes its steps, and the others go on until their test loss is as low.
What counts is the time from the first step to the evaluation that reaches it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from benchmarks import processes
from benchmarks.converge import Learned
from benchmarks.measure import Claim, Result, Setting, Skipped, per_round, time_in_turns
from benchmarks.processes import Failed
from paceline.errors import LaunchError
from paceline.launch.emulate import check_permission

TITLE = "Two emulated hosts, 100 Mbit/s: seconds to the target of sync"
EMULATION = ("--emulate", "hosts=2,link=100mbit", "--replicas", "2", "--batchnorm", "local")
SYNC = "every step"
WAYS: dict[str, tuple[str, ...]] = {
    SYNC: (),
    "--every 8": ("--every", "8"),
    "--every 8 --outer-momentum 0.5": ("--every", "8", "--outer-momentum", "0.5"),
    "--every 8 --wire bf16": ("--every", "8", "--wire", "bf16"),
}
AT_MOST = 0.3


DIGITS, TEXT = "digits", "transformer"
LONGER = 4  # as many steps as sync's a run may have to come as far


@dataclass
class Size:
    digits: tuple[str, ...] = ()  # arguments of its script
    text: tuple[str, ...] = ()
    text_steps: int = 240  # of sync
    ways: tuple[str, ...] = tuple(WAYS)
    loss: float = 0.0  # that sync has come to in this round

    def seconds(self, task: str, way: str) -> float:
        """How long a way takes to come as far as sync, which has its turn first."""
        if task == DIGITS:
            return self._learn(task, way, "learn_digits.py", self.digits).seconds
        if way == SYNC:
            learned = self._learn(task, way, "learn_text.py", (*self.text, "--steps", str(self.text_steps)))
            self.loss = learned.value
            return learned.seconds
        given = ("--steps", str(LONGER * self.text_steps), "--loss", str(self.loss))
        return self._learn(task, way, "learn_text.py", (*self.text, *given)).seconds

    def _learn(self, task: str, way: str, script: str, given: tuple[str, ...]) -> Learned:
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            out = Path(folder) / "learned.json"
            processes.run([processes.paceline(script, [*given, "--out", str(out)], (*EMULATION, *WAYS[way]))])
            learned = msgspec.json.decode(out.read_bytes(), type=Learned)
            if not learned.reached and (task, way) != (TEXT, SYNC):
                raise Failed(f"{task}, {way}: what sync reaches was not reached in {learned.steps} steps")
            return learned


SIZES = {
    "full": Size(),
    "quick": Size(text_steps=80, ways=(SYNC, "--every 8")),
    "tiny": Size(
        digits=("--accuracy", "0.1", "--width", "16"),
        text=("--width", "16", "--look-every", "2"),
        text_steps=2,
        ways=(SYNC, "--every 8"),
    ),
}


def run(setting: Setting) -> Result:
    size = SIZES[setting.scale]
    try:
        check_permission()
    except LaunchError as error:
        raise Skipped(str(error)) from error
    contestants: dict[str, Callable[[], float]] = {
        f"{task}, {way}": partial(size.seconds, task, way) for task in (DIGITS, TEXT) for way in size.ways
    }
    series = time_in_turns(contestants, setting, "s")
    claims = [
        Claim(
            text=f"100 Mbit/s, {task}, {way}: seconds to the target over sync's",
            rounds=per_round(series[f"{task}, {way}"], series[f"{task}, {SYNC}"]),
            at_most=AT_MOST if way == "--every 8" else None,
        )
        for task in (DIGITS, TEXT)
        for way in size.ways
        if way != SYNC
    ]
    note = "Time from the first step to the evaluation that reaches the target, evaluations included."
    return Result(title=TITLE, series=tuple(series.values()), claims=tuple(claims), notes=(note,))
