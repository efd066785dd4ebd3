"""What a supervisor is to start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from paceline.launch.meeting_door import HostsSetting
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
    server_hosts: tuple[int, ...] = ()  # by server that the run starts: on which host
    hosts: HostsSetting | None = None  # where the supervisors meet; None: servers, if there are any, are on one host
    token: str | None = None  # of the servers, if not a new one
    keys: str | None = None  # folder with keys, if the servers speak TLS
    container: str = ""
    stall_s: float = STALL_S
    module: bool = False  # `script` is a module's name, as with `python -m`
    until: Target | None = None  # the run stops when it is reached
    goes_on: bool = False  # no, it does not
    longest_s: float | None = None  # of training, from the first step on

    @property
    def servers_here(self) -> list[int]:
        """Which of the run's servers this host starts."""
        return [number for number, host in enumerate(self.server_hosts) if host == self.place.host]

    @property
    def is_cut(self) -> bool:
        """Whether a replica is several processes, of which none can do without the others."""
        return self.place.strategy.split is not None

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
