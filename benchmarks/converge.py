"""Four emulated hosts on the digits: steps, and bytes that a host sends, until the test accuracy is 0.97.

Counts, so a busy machine changes none of them; three seeds a way, and no rounds. The table of docs/hosts.md is of it.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks import processes
from benchmarks.measure import Claim, Result, Series, Setting, Skipped
from paceline.errors import LaunchError
from paceline.launch.emulate import check_permission

TITLE = "Digits on four emulated hosts: steps and bytes to a test accuracy of 0.97, three seeds"
HOSTS = 4
SYNC = "every step, fp32"
# Exact ones cross the link at each step, and would be most of what a small model sends by some of these ways.
STATISTICS = ("--batchnorm", "local")
WAYS: dict[str, tuple[str, ...]] = {
    SYNC: (),
    "--wire int8": ("--wire", "int8"),
    "--wire topk:0.01": ("--wire", "topk:0.01"),
    "--wire powersgd:4": ("--wire", "powersgd:4"),
    "--every 8": ("--every", "8"),
    "--every 8 --outer-momentum 0.5": ("--every", "8", "--outer-momentum", "0.5"),
    "--gossip": ("--gossip",),
    "--every 8 --gossip": ("--every", "8", "--gossip"),
    "--every 8 --wire int8": ("--every", "8", "--wire", "int8"),
    "--every 8 --wire topk:0.1": ("--every", "8", "--wire", "topk:0.1"),
}


class Learned(msgspec.Struct, frozen=True):
    """What the script has written."""

    steps: int
    bytes: int
    seconds: float
    reached: bool
    value: float = 0.0  # of the last evaluation, if it is told


@dataclass(frozen=True)
class Size:
    ways: tuple[str, ...] = tuple(WAYS)
    seeds: int = 3
    epochs: int = 40
    accuracy: float = 0.97
    width: int = 2048

    def learn(self, flags: tuple[str, ...], seed: int, link: str = "1gbit", hosts: int = HOSTS) -> Learned:
        """Trains until the accuracy is reached."""
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            out = Path(folder) / "learned.json"
            given = {"seed": seed, "epochs": self.epochs, "accuracy": self.accuracy, "width": self.width, "out": out}
            arguments = [word for name, value in given.items() for word in (f"--{name}", str(value))]
            flags = ("--replicas", str(hosts), "--emulate", f"hosts={hosts},link={link}", *STATISTICS, *flags)
            processes.run([processes.paceline("learn_digits.py", arguments, flags)])
            return msgspec.json.decode(out.read_bytes(), type=Learned)


SIZES = {
    "full": Size(),
    "quick": Size(seeds=1),
    "tiny": Size((SYNC, "--gossip"), seeds=1, epochs=1, accuracy=0.1, width=16),
}


def run(setting: Setting) -> Result:
    size = SIZES[setting.scale]
    try:
        check_permission()
    except LaunchError as error:
        raise Skipped(str(error)) from error
    found: dict[str, list[Learned]] = {}
    for name in size.ways:
        for seed in range(size.seeds):
            found.setdefault(name, []).append(learned := size.learn(WAYS[name], seed))
            after = "" if learned.reached else ", not reached"
            setting.say(f"{name}, seed {seed}: {learned.steps} steps, {learned.bytes / 1e6:.2f} MB{after}")
    series = [
        series
        for name, learned in found.items()
        for series in (
            Series(name, "steps", tuple(float(one.steps) for one in learned)),
            Series(name, "MB sent", tuple(one.bytes / 1e6 for one in learned)),
        )
    ]
    sync = statistics.median(one.bytes for one in found[SYNC])
    claims = [
        Claim(text=f"Digits, four hosts, {name}: bytes over sync's", rounds=tuple(one.bytes / sync for one in learned))
        for name, learned in found.items()
        if name != SYNC
    ]
    missed = [
        f"{name}: not reached with seed {seed}"
        for name, learned in found.items()
        for seed, one in enumerate(learned)
        if not one.reached
    ]
    notes = ("A figure a seed. Bytes are those of host 0's link, headers and evaluations included.", *missed)
    return Result(title=TITLE, series=tuple(series), claims=tuple(claims), notes=notes)
