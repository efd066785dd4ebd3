"""What is predicted of one way to run a script."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

import msgspec

from paceline.profile.values import Timing
from paceline.strategy import Strategy


class TimePart(msgspec.Struct, frozen=True):
    """A part of a step's time: what it is spent on."""

    name: str  # compute, input, exchange, update, link, wait
    seconds: float


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run a script, and what it comes to."""

    name: str
    family: str  # under which runs are learned from
    strategy: Strategy
    hosts: int
    devices: int  # that do the work; servers not counted
    batch_size: int
    step: Timing  # of one update
    samples_per_s: float
    speedup: float  # over one device's
    parts: tuple[TimePart, ...]
    memory_bytes: int  # of a device
    host_memory_bytes: int
    fits: bool
    link_bytes: float  # that a host sends in a step, and receives
    binds: str
    run_s: float | None = None  # of all steps of the script's loop
    staleness: float | None = None
    late: float = 0.0  # share of gradients thrown away
    outside: tuple[str, ...] = ()  # what is beyond the measurements
    estimate: bool = False  # by a described device
    exact: bool = True  # whether the result is that of one process

    @property
    def device_hours(self) -> float | None:
        """What a run costs, in hours of one device."""
        return None if self.run_s is None else self.run_s * self.devices / 3600

    def flags(self) -> list[str]:
        """What `paceline run` is given on one machine."""
        return self.strategy.flags()

    def command(self, script: str, arguments: Sequence[str] = (), *, module: bool = False) -> list[str]:
        """Returns what to type: on one machine, on each of several (as number K); with servers first what those need,
        on every machine that is to be one."""
        tail = ["--", *arguments] if arguments else []
        what = ["-m", script] if module else [script]
        if self.hosts == 1:
            return [shlex.join(["paceline", "run", *what, *self.flags(), *tail])]
        of_hosts = ["--nnodes", str(self.hosts), "--node-rank", "K", "--rdzv-endpoint", "HOST0:29500"]
        if not self.strategy.on_servers:
            return [shlex.join(["paceline", "run", *what, *self.flags(), *of_hosts, *tail])]
        servers = self.strategy.server_processes
        flags = [word for pair in _pairs(self.flags()) if pair[0] not in ("--servers", "--exchange") for word in pair]
        joined = ["--join", ",".join(f"SERVER{number}:7070" for number in range(servers)), "--keys", "KEYS"]
        return [
            "paceline server --dir server --listen 0.0.0.0:7070 --keys KEYS",
            shlex.join(["paceline", "run", *what, *flags, *joined, "--container", "NAME", *of_hosts, *tail]),
        ]


def _pairs(flags: Sequence[str]) -> list[list[str]]:
    """Returns every flag with its value."""
    found: list[list[str]] = []
    for word in flags:
        if word.startswith("--"):
            found.append([word])
        else:
            found[-1].append(word)
    return found


def total(parts: Sequence[Timing]) -> Timing:
    """Returns the sum of times whose errors have nothing to do with one another.

    >>> total([Timing(3, 0, 6), Timing(4, 0, 8)])
    Timing(seconds=7, low=2.0, high=12.0)
    """
    seconds = sum(part.seconds for part in parts)
    below = math.sqrt(sum((part.seconds - part.low) ** 2 for part in parts))
    above = math.sqrt(sum((part.high - part.seconds) ** 2 for part in parts))
    return Timing(seconds, max(0.0, seconds - below), seconds + above)
