"""Two emulated hosts with two replicas each and a link of 1 Gbit/s between them: what crosses the link, and how."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from benchmarks import processes
from benchmarks.measure import Claim, Result, Setting, Skipped, fastest, per_round, time_in_turns
from benchmarks.training import Training, ddp_ways
from paceline.errors import LaunchError
from paceline.launch.emulate import EmulatedHosts, Emulation, check_permission

TITLE = "Two emulated hosts × two replicas, 1 Gbit/s, MLP of 15M parameters, 32 samples a replica"
EMULATION = "hosts=2,link=1gbit"
REPLICAS = 4
# wire format: samples/s over DDP's
BARS = {"fp32": 1.3, "bf16": 2.3}


@dataclass(frozen=True)
class Size:
    training: Training
    wires: tuple[str, ...] = ("fp32", "bf16", "int8")


SIZES = {
    "full": Size(Training("mlp", 2048, 4, batch_size=32, steps=12, warm_up=3)),
    "quick": Size(Training("mlp", 512, 4, batch_size=32, steps=8, warm_up=2)),
    "tiny": Size(Training("mlp", 16, 1, batch_size=2, steps=2, warm_up=1), wires=("fp32",)),
}


def run(setting: Setting) -> Result:
    size, ways = SIZES[setting.scale], ddp_ways(setting)
    try:
        check_permission()
    except LaunchError as error:
        raise Skipped(str(error)) from error
    contestants = {
        f"Paceline, wire {wire}": partial(size.training.replicas, REPLICAS, "--emulate", EMULATION, "--wire", wire)
        for wire in size.wires
    }
    with EmulatedHosts(Emulation.parse(EMULATION)) as hosts:
        for name, options in ways.items():
            contestants[name] = partial(_ddp, size.training, hosts, options)
        series = time_in_turns(contestants, setting, "ms a step")
    peer = fastest([series[name] for name in ways])
    claims = [
        Claim(
            text=f"Two hosts, wire {wire}: samples/s over DDP's",
            rounds=per_round(peer, series[f"Paceline, wire {wire}"]),
            at_least=BARS.get(wire),
        )
        for wire in size.wires
    ]
    note = "The link is emulated with network namespaces and a token bucket, both ways."
    return Result(title=TITLE, series=tuple(series.values()), claims=tuple(claims), notes=(note,))


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
