"""Calibrates this machine: small runs of the product itself, one for every exchange, and what its cores do.

Each run is `paceline run` of `calibration_script`, as a user would start it. What cannot be run here (emulated hosts
without root) is left out, and said. A run beside which other programs were busy, or that computed longer than its like,
is made again, and what is faster of both is kept; how busy they were is written into the calibration.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import msgspec

from paceline.errors import LaunchError
from paceline.launch.cores import allowed_cores
from paceline.launch.emulate import check_permission
from paceline.plan.calibrate_tls import server_with_keys
from paceline.plan.calibration import (
    BUSY,
    HEADERS,
    Calibration,
    ExchangeCurve,
    ExchangePoint,
    fingerprint,
    total_memory,
)
from paceline.profile.other_load import LoadOfOthers

LONGEST_RUN_S = 120.0
LINK = "1gbit"
_LONGER = 1.5  # times as long: such a run was disturbed
_LARGE_BYTES = 8 << 20  # of models by whose computing that is seen
_MOST_AGAIN = 4  # runs that are made again
_LINK_BYTES_PER_S = 125e6
Show = Callable[[str, int, int], None]  # what is measured now, how many are done, how many there are


@dataclass(frozen=True)
class CalibrationRun:
    """One run, and the curve that it gives."""

    exchange: str
    replicas: int
    flags: tuple[str, ...]
    servers: int = 0
    wire: str = "fp32"
    steps: int = 18

    @property
    def words(self) -> str:
        servers = f", {self.servers} server{'s' if self.servers > 1 else ''}" if self.servers else ""
        wire = f", {self.wire}" if self.wire != "fp32" else ""
        return f"{self.exchange}, {self.replicas} replica{'s' if self.replicas > 1 else ''}{servers}{wire}"


@dataclass(frozen=True)
class LinkCosts:
    """What is known of links: as it usually is, where they cannot be measured."""

    overhead: float = 0.5
    between_hosts_s: float = 0.002


def calibration_runs(cores: int) -> list[CalibrationRun]:
    """Returns the runs that calibrate a machine of so many cores."""
    full = max(2, cores)
    several = sorted({1, 2, full, 2 * full})
    shared = [CalibrationRun("shared", count, ("--replicas", str(count))) for count in several]
    collective = [
        CalibrationRun(
            "collective", 2, ("--replicas", "2", "--exchange", "collective", "--wire", wire), wire=wire, steps=14
        )
        for wire in ("fp32", "bf16", "int8")
    ]
    on_servers = [
        CalibrationRun("servers", replicas, ("--replicas", str(replicas), "--servers", str(count)), servers=count)
        for replicas, count in sorted({(2, 1), (2, 2), (full, 1), (full, 2)})
    ]
    stages = ("--stages", "2", "--micro-batches", "1")  # one after the other: what they take beyond computing
    on_servers.append(CalibrationRun("cut", 2, stages, steps=26))
    turns = ("--replicas", "2", "--servers", "1", "--async")
    on_servers.append(CalibrationRun("async", 2, turns, servers=1))
    tcp = ("--replicas", "2", "--servers", "1", "--exchange", "tcp")
    on_servers.append(CalibrationRun("tcp", 2, tcp, servers=1, steps=14))
    on_servers.append(CalibrationRun("tls", 2, ("--replicas", "2", "--exchange", "tcp"), servers=1, steps=12))
    return [*shared, *collective, *on_servers]


def calibrate(show: Show, note: Callable[[str], None] = lambda _: None) -> Calibration:
    """Returns what was measured; `show` is told how far it is, `note` what had to be left out."""
    began, load = time.monotonic(), LoadOfOthers()
    cores = len(allowed_cores())
    runs = calibration_runs(cores)
    try:
        check_permission()
        emulated = True
    except LaunchError as error:
        note(f"links are not measured: {error}")
        emulated = False
    count = len(runs) + 1 + emulated
    show("memory and cores", 0, count)
    own = _machine()
    curves: list[ExchangeCurve] = []
    seen: list[tuple[int, ExchangePoint]] = []  # with how many replicas there were, also of runs that are made again
    left = _MOST_AGAIN
    for number, run in enumerate(runs):
        show(run.words, number + 1, count)
        try:
            with server_with_keys() if run.exchange == "tls" else nullcontext(()) as joined:
                others = LoadOfOthers()
                points = _run(run, joined)
                seen += [(run.replicas, point) for point in points]
                # Of a server that was started beside it this process has not been told yet how long it worked.
                busy = not joined and others.cores() > BUSY
                if left > 0 and (busy or _disturbed(points, run.replicas, curves)):
                    left -= 1
                    again = _run(run, joined)
                    seen += [(run.replicas, point) for point in again]
                    points = tuple(map(_faster, points, again))
        except LaunchError as error:
            if run.exchange == "shared":  # without which there is nothing to plan with
                raise
            note(f"{run.words} is left out: {error}")
            continue
        curve = ExchangeCurve(
            exchange=run.exchange, replicas=run.replicas, servers=run.servers, wire=run.wire, points=points
        )
        curves.append(curve)
    links = LinkCosts()
    if any(curve.exchange == "collective" and curve.wire == "fp32" for curve in curves):
        links = replace(links, between_hosts_s=_between_hosts(_curve(curves, "collective", 2), curves))
    else:
        emulated = False
    if emulated:
        show(f"two hosts, a link of {LINK}", count - 1, count)
        flags = ("--replicas", "2", "--emulate", f"hosts=2,link={LINK}")
        points = run_points(flags, 10, norms=False)
        links = LinkCosts(_link_overhead(points, curves), _between_hosts(points, curves))
    show("done", count, count)
    return Calibration(
        machine=fingerprint(),
        made=time.strftime("%Y-%m-%d %H:%M"),
        cores=cores,
        memory_bytes=total_memory(),
        memory_bandwidth=own["one"],
        memory_bandwidth_all=own["all"],
        neighbour_compute=own["compute"],
        neighbour_memory=own["memory"],
        mailbox_s=own["mailbox"],
        link_overhead=links.overhead,
        between_hosts_s=links.between_hosts_s,
        step_spread=step_spread(seen),
        curves=tuple(curves),
        seconds=time.monotonic() - began,
        load=load.cores(),
    )


def _run(run: CalibrationRun, joined: Sequence[str]) -> tuple[ExchangePoint, ...]:
    """Makes a run; one that joins a server trains a container of its own there."""
    container = ("--container", f"calibration-{time.monotonic_ns()}") if joined else ()
    few = run.exchange in ("cut", "tls")
    return run_points((*run.flags, *joined, *container), run.steps, norms=run.exchange == "shared", few=few)


def _disturbed(points: Sequence[ExchangePoint], replicas: int, curves: Sequence[ExchangeCurve]) -> bool:
    """Returns whether computing took longer than in the first run of as many replicas: something else was busy."""
    alike = [curve for curve in curves if curve.exchange == "shared" and curve.replicas == replicas]
    before = {point.bytes: point.computed_s for curve in alike for point in curve.points if point.bytes > _LARGE_BYTES}
    return any(point.computed_s > _LONGER * before[point.bytes] for point in points if point.bytes in before)


def _faster(one: ExchangePoint, other: ExchangePoint) -> ExchangePoint:
    return min(one, other, key=lambda point: point.seconds)


def run_points(flags: Sequence[str], steps: int, *, norms: bool, few: bool = False) -> tuple[ExchangePoint, ...]:
    """Returns the points that one run of the calibration script gives."""
    with tempfile.TemporaryDirectory(prefix="paceline-calibrate-") as scratch:
        out = Path(scratch) / "points.json"
        command = [sys.executable, "-m", "paceline", "run", "-m", "paceline.plan.calibration_script", *flags]
        command += [
            "--run-folder",
            str(Path(scratch) / "run"),
            "--quiet",
            "--",
            "--out",
            str(out),
            "--steps",
            str(steps),
        ]
        command += ["--few"] if few else [] if norms else ["--no-norms"]
        done = _until_its_end(command, f"calibrating with `{' '.join(flags)}`", cwd=scratch)
        if done.returncode or not out.exists():
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise LaunchError(f"calibrating with `{' '.join(flags)}` failed: {last[0]}")
        return msgspec.json.decode(out.read_bytes(), type=tuple[ExchangePoint, ...])


def _until_its_end(command: Sequence[str], what: str, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST_RUN_S, cwd=cwd)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{what} took longer than {LONGEST_RUN_S:g} s: try again on a quiet machine") from None


def _machine() -> dict[str, float]:
    command = [sys.executable, "-m", "paceline.plan.machine_script"]
    done = _until_its_end(command, "measuring memory and cores")
    if done.returncode:
        raise LaunchError(f"measuring memory and cores failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def step_spread(seen: Sequence[tuple[int, ExchangePoint]]) -> float:
    """Returns by how much computing the same differs from run to run: the standard deviation of its logarithm. Of most
    models there is a measurement of as many replicas in every run, over all the time that this takes.

    >>> points = [(2, ExchangePoint(8, 1.0, 1.0, 1.0, computed_s=seconds)) for seconds in (1.0, 1.2)]
    >>> round(step_spread([*points, (1, points[0][1])]), 3)
    0.129
    """
    alike: dict[tuple[int, ...], list[float]] = {}
    for replicas, point in seen:
        if point.computed_s > 0:
            key = (replicas, point.bytes, point.tensors, point.norms)
            alike.setdefault(key, []).append(math.log(point.computed_s))
    square = sum((log - fmean(logs)) ** 2 for logs in alike.values() for log in logs)
    return max(0.01, math.sqrt(square / max(1, sum(len(logs) - 1 for logs in alike.values()))))


def _curve(curves: Sequence[ExchangeCurve], exchange: str, replicas: int) -> tuple[ExchangePoint, ...]:
    return next(curve.points for curve in curves if curve.exchange == exchange and curve.replicas == replicas)


def _seconds(points: Sequence[ExchangePoint], nbytes: int) -> float:
    return next(point.seconds for point in points if point.bytes == nbytes)


def _between_hosts(points: Sequence[ExchangePoint], curves: Sequence[ExchangeCurve]) -> float:
    """Returns what a step of the smallest model takes between hosts, beyond what it takes on one."""
    smallest = min(point.bytes for point in points)
    return max(1e-4, _seconds(points, smallest) - _seconds(_curve(curves, "shared", 1), smallest))


def _link_overhead(points: Sequence[ExchangePoint], curves: Sequence[ExchangeCurve]) -> float:
    """Returns how much of the core's time for coding and sending a link does not hide, by the largest model."""
    sizes = sorted({point.bytes for point in points if point.tensors < 64})
    smallest, largest = sizes[0], sizes[-1]
    alone, collective = _curve(curves, "shared", 1), _curve(curves, "collective", 2)

    def grown(more: Sequence[ExchangePoint]) -> float:
        """Returns what the largest model takes beyond the smallest, and beyond what that takes on one host."""
        beyond = [_seconds(more, size) - _seconds(alone, size) for size in (smallest, largest)]
        return beyond[1] - beyond[0]

    left = grown(points) - (largest - smallest) / (_LINK_BYTES_PER_S * HEADERS)
    return min(1.5, max(0.0, left / max(1e-9, grown(collective))))
