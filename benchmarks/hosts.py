"""Four replicas on emulated hosts and links of 1 Gbit/s, 15M parameters: a step, and what its bytes alone would take.

Two hosts of two replicas, and four of one. By every way of the exchange a host sends and receives 2 (H - 1) / H of the
gradient, coded: divided by the link's rate that is the shortest a step could be. With --overlap the next forward runs
while gradients still travel. DDP on Gloo is beside it, as it comes
and with torch's own hooks, which send bf16 and (PowerSGD) matrices of rank 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from benchmarks import processes
from benchmarks.measure import Claim, Result, Series, Setting, Skipped, fastest, per_round, time_in_turns
from benchmarks.training import Training, ddp_ways
from paceline.errors import LaunchError
from paceline.launch.emulate import EmulatedHosts, Emulation, check_permission

TITLE = "Four replicas on two and on four emulated hosts, 1 Gbit/s, MLP of 15M parameters, 32 samples a replica"
REPLICAS = 4
LINK, LINK_BYTES_A_S = "1gbit", 125e6
LAYOUTS = (2, 4)  # hosts
DDP_BARS = {"fp32": 1.3, "bf16": 2.3}  # samples/s over DDP's
LINK_BARS = {"fp32": 0.9, "bf16": 0.85, "int8": 0.7}  # of what the bytes allow, with --overlap
HOOKS = {"DDP, bf16 hook": ("--bucket-view", "--hook", "bf16"), "DDP, PowerSGD hook": ("--hook", "powersgd")}


@dataclass(frozen=True)
class Size:
    training: Training
    layouts: tuple[int, ...] = LAYOUTS
    wires: tuple[str, ...] = ("fp32", "bf16", "int8", "topk:0.01", "powersgd:4")
    overlapped: tuple[str, ...] = tuple(LINK_BARS)
    hooks: tuple[str, ...] = tuple(HOOKS)


SIZES = {
    "full": Size(Training("mlp", 2048, 4, batch_size=32, steps=12, warm_up=3)),
    "quick": Size(Training("mlp", 512, 4, batch_size=32, steps=8, warm_up=2)),
    "tiny": Size(
        Training("mlp", 16, 1, batch_size=2, steps=2, warm_up=1), (2,), ("fp32",), ("fp32",), ("DDP, bf16 hook",)
    ),
}


def run(setting: Setting) -> Result:
    try:
        check_permission()
    except LaunchError as error:
        raise Skipped(str(error)) from error
    size = SIZES[setting.scale]
    series: dict[str, Series] = {}
    claims: list[Claim] = []
    for hosts in size.layouts:
        with EmulatedHosts(Emulation(hosts, LINK)) as emulated:
            found = time_in_turns(_contestants(size, setting, hosts, emulated), setting, "ms a step")
        series |= found
        claims += _claims(size, setting, hosts, found)
    notes = (
        "Links are emulated with network namespaces and token buckets, both ways.",
        "What the bytes allow is of a host's part of the coded gradient over the link's rate, without any header.",
        "torch refuses its bf16 hook on Gloo by name; it is called through a function of another name.",
    )
    return Result(title=TITLE, series=tuple(series.values()), claims=tuple(claims), notes=notes)


def _contestants(size: Size, setting: Setting, hosts: int, emulated: EmulatedHosts) -> dict[str, Callable[[], float]]:
    emulation = ("--emulate", f"hosts={hosts},link={LINK}")
    found: dict[str, Callable[[], float]] = {
        _in(f"Paceline, wire {wire}", hosts): partial(size.training.replicas, REPLICAS, *emulation, "--wire", wire)
        for wire in size.wires
    }
    for wire in size.overlapped:
        flags = (*emulation, "--wire", wire, "--overlap")
        found[_in(_overlapped(wire), hosts)] = partial(size.training.replicas, REPLICAS, *flags)
    hooks = {name: HOOKS[name] for name in size.hooks}
    for name, options in {**ddp_ways(setting), **hooks}.items():
        found[_in(name, hosts)] = partial(_ddp, size.training, emulated, options)
    return found


def _claims(size: Size, setting: Setting, hosts: int, series: dict[str, Series]) -> list[Claim]:
    peer = fastest([series[_in(name, hosts)] for name in ddp_ways(setting)])
    claims = []
    for wire in size.wires:
        found = series[_in(f"Paceline, wire {wire}", hosts)]
        text = _in(f"wire {wire}", hosts)
        claims.append(
            Claim(text=f"{text}: samples/s over DDP's", rounds=per_round(peer, found), at_least=DDP_BARS.get(wire))
        )
        if wire in LINK_BARS:
            claims.append(_of_the_link(size, hosts, wire, text, found, bar=None))
    for wire in size.overlapped:
        found = series[_in(_overlapped(wire), hosts)]
        claims.append(_of_the_link(size, hosts, wire, _in(f"wire {wire}, overlap", hosts), found, LINK_BARS[wire]))
    return claims


def _of_the_link(size: Size, hosts: int, wire: str, text: str, found: Series, bar: float | None) -> Claim:
    allowed = allowed_ms(size.training, hosts, wire)
    ratios = tuple(allowed / figure for figure in found.rounds)
    return Claim(text=f"{text}: of what the bytes allow, {allowed:.0f} ms", rounds=ratios, at_least=bar)


def _overlapped(wire: str) -> str:
    return f"Paceline, wire {wire}, --overlap"


def allowed_ms(training: Training, hosts: int, wire: str) -> float:
    """What a host's bytes alone take on its link, in each direction."""
    bytes_a_value = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4 / 1024}[wire]
    return 1000 * 2 * (hosts - 1) / hosts * parameters(training) * bytes_a_value / LINK_BYTES_A_S


def parameters(training: Training) -> int:
    """How many an MLP of scripts/workload.py has."""
    sizes = [784, *[training.width] * training.depth, 10]
    return sum(inputs * outputs + outputs for inputs, outputs in pairwise(sizes))


def _in(name: str, hosts: int) -> str:
    return f"{hosts} × {REPLICAS // hosts}, {name}"


def _ddp(training: Training, hosts: EmulatedHosts, options: tuple[str, ...]) -> float:
    return training.time(
        lambda times: processes.ranks(
            "train_ddp.py",
            [*training.arguments(times), *options],
            REPLICAS,
            hosts=len(hosts.names),
            address=hosts.addresses[0],
            on_host=hosts.command,
            environment={"GLOO_SOCKET_IFNAME": hosts.interface},
        )
    )
