"""What a supervisor is to start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from paceline.run_place import PLACE_VARIABLE, Place
from paceline.watch.events import STALL_S
from paceline.watch.target import Target

POLICIES = ("continue", "restart", "stop")


@dataclass(frozen=True)
class RunJob:
    """What to start on this host. `place` is replica 0's; the others differ in their number."""

    script: str
    arguments: tuple[str, ...]
    place: Place
    on_failure: str = "continue"
    max_restarts: int = 10
    shown: bool = True  # pass on what the lowest living replica prints
    servers: int = 0  # to start on this host
    container: str = ""
    stall_s: float = STALL_S
    module: bool = False  # `script` is a module's name, as with `python -m`
    until: Target | None = None  # the run stops when it is reached
    goes_on: bool = False  # no, it does not
    longest_s: float | None = None  # of training, from the first step on

    @property
    def stops(self) -> bool:
        """Whether the run may stop by itself before its script has ended."""
        return (self.until, self.longest_s, self.place.most_steps) != (None, None, None)

    @property
    def command(self) -> list[str]:
        """What comes after `python`."""
        return [*(["-m"] if self.module else []), self.script, *self.arguments]


def run_alone(command: Sequence[str], place: Place) -> subprocess.CompletedProcess[str]:
    """Run a script in one process, which nobody supervises; `command`: what comes after `python`."""
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, PLACE_VARIABLE: msgspec.json.encode(place).decode()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
