"""Servers on two of four emulated hosts, a replica on each, 1 Gbit/s: how much of the link is in use.

Push and pull of a model of 40 MB, half of it on either server; the gradient is there already, as in `servers`. Over the
link of a host with a server come, for one step of every replica, the pushes of the three replicas elsewhere and a pull
of its own from the other server: twice the model, and as much goes out. That over the rate is the shortest it can be.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks import processes
from benchmarks.measure import Claim, Result, Setting, Skipped, time_in_turns
from benchmarks.servers import SIZES as PUSHES
from benchmarks.servers import Size
from paceline.errors import LaunchError
from paceline.launch.emulate import check_permission

TITLE = "Servers on 2 of 4 emulated hosts, 4 replicas, push and pull of a 40 MB model, 1 Gbit/s"
HOSTS = 4
LINK, LINK_BYTES_A_S = "1gbit", 125e6
AT_LEAST = 0.85
SIZES = {
    "full": replace(PUSHES["full"], replicas=(HOSTS,), steps=16, warm_up=4),
    "quick": replace(PUSHES["quick"], replicas=(HOSTS,), steps=6, warm_up=2),
    "tiny": replace(PUSHES["tiny"], replicas=(HOSTS,)),
}
WAYS: dict[str, tuple[str, ...]] = {"async": ("--async",), "sync": ()}


def run(setting: Setting) -> Result:
    size = SIZES[setting.scale]
    try:
        check_permission()
    except LaunchError as error:
        raise Skipped(str(error)) from error
    contestants = {f"Paceline, {name}": partial(_rate, size, flags) for name, flags in WAYS.items()}
    series = time_in_turns(contestants, setting, "steps/s, all replicas")
    claims = [
        Claim(
            text=f"Servers on 2 of 4 hosts, {name}: bytes/s over the link's",
            rounds=tuple(rate / HOSTS * 2 * size.bytes / LINK_BYTES_A_S for rate in series[f"Paceline, {name}"].rounds),
            at_least=AT_LEAST,
        )
        for name in WAYS
    ]
    note = "Bytes of parameters and gradients alone, in one direction of the link of a host that has a server."
    return Result(title=TITLE, series=tuple(series.values()), claims=tuple(claims), notes=(note,))


def _rate(size: Size, flags: tuple[str, ...]) -> float:
    emulation = ("--emulate", f"hosts={HOSTS},link={LINK}", "--servers", "2", "--servers-on", "0,1")

    def start(arguments: list[str]) -> None:
        flags_ = ("--replicas", str(HOSTS), *emulation, *flags)
        processes.run([processes.paceline("push_paceline.py", arguments, flags_)])

    return size.rate(start, files=HOSTS)
