"""Where more devices stop paying, what binds there, and what would move that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from paceline.plan.candidates import replica_counts
from paceline.plan.cluster import MOST_LINK_BITS, Cluster
from paceline.plan.far_servers import far_servers, step_cost
from paceline.plan.mirrored_step import local_steps
from paceline.plan.predict import StepPredictor
from paceline.plan.prediction import Prediction
from paceline.plan.simulate import simulate
from paceline.rules import Sync

NEARLY = 0.97  # of the most that can be had: fewer devices for that much are the point of saturation
_WORTH_SAYING = 1.03
_LOCAL_STEPS = 8
_FASTER_LINK = 10  # times as fast


# Plans that are not those of one process, and what they do instead.
_DIFFERENT: dict[str, Callable[[Prediction], bool]] = {
    "gradients that are rounded on the link": lambda plan: plan.exact and plan.strategy.wire != "fp32",
    "nobody waits for others, gradients are stale": lambda plan: plan.staleness is not None,
}


class CurvePoint(msgspec.Struct, frozen=True):
    """So many devices, and how many times faster than one they are."""

    devices: int
    hosts: int
    speedup: float
    low: float
    high: float
    binds: str


class SpeedupCurve(msgspec.Struct, frozen=True):
    """Speed-up against devices, by one way of distributing."""

    name: str
    points: tuple[CurvePoint, ...]

    @property
    def saturates(self) -> CurvePoint:
        """Returns the point from which on more devices gain next to nothing."""
        most = max(point.speedup for point in self.points)
        return next(point for point in self.points if point.speedup >= NEARLY * most)

    @property
    def falls(self) -> bool:
        """Returns whether more devices than that are slower."""
        return self.points[-1].speedup < NEARLY * max(point.speedup for point in self.points)


class Lever(msgspec.Struct, frozen=True):
    """Something that would make a plan faster, and by how much."""

    what: str
    gain: float  # samples/s over those without it
    how: str  # flags, or what to change


def speedup_curve(predictor: StepPredictor, wire: str = "fp32") -> SpeedupCurve:
    """Returns the curve of mirrored replicas on as few hosts as hold them."""
    best: dict[int, Prediction] = {}
    for count, hosts in replica_counts(predictor.cluster, predictor.profile.batch_size):
        found = predictor.mirrored(count, hosts, wire) if count > 1 else predictor.one
        if count not in best or found.samples_per_s > best[count].samples_per_s:
            best[count] = found
    return SpeedupCurve(f"mirrored, {wire}", tuple(_point(best[count]) for count in sorted(best)))


def _point(found: Prediction) -> CurvePoint:
    return CurvePoint(
        found.devices,
        found.hosts,
        found.speedup,
        found.speedup * found.step.seconds / found.step.high,
        found.speedup * found.step.seconds / max(1e-9, found.step.low),
        found.binds,
    )


def levers(predictor: StepPredictor, plan: Prediction, everything: Sequence[Prediction] = ()) -> list[Lever]:
    """Returns what would make this plan faster, the best first; `everything`: other plans, some of which train a little
    differently."""
    found: list[Lever] = []
    profile, cluster = predictor.profile, predictor.cluster

    def add(what: str, other: float, how: str) -> None:
        if other > _WORTH_SAYING * plan.samples_per_s:
            found.append(Lever(what, other / plan.samples_per_s, how))

    for what, allowed in _DIFFERENT.items():
        other_plan = max(filter(allowed, everything), key=lambda other: other.samples_per_s, default=None)
        if other_plan is not None and other_plan.fits:
            how = f"{other_plan.name}: {' '.join(other_plan.flags())}"
            add(what, other_plan.samples_per_s, how)
    replicas, hosts = plan.strategy.replicas, plan.hosts
    whole = plan.strategy.split is None and not plan.strategy.on_servers
    if whole and hosts > 1:
        for wire in ("bf16", "int8"):
            other = predictor.mirrored(replicas, hosts, wire).samples_per_s
            add(f"a wire of {wire}", other, f"--wire {wire}")
        faster = StepPredictor(profile, predictor.calibration, _with_link(cluster, _FASTER_LINK))
        other = faster.mirrored(replicas, hosts, plan.strategy.wire).samples_per_s
        add(f"links of {faster.cluster.link} instead of {cluster.link}", other, "another network")
        for fewer in range(1, hosts):
            if replicas % fewer == 0 and replicas // fewer <= cluster.devices_of_host:
                other = predictor.mirrored(replicas, fewer, plan.strategy.wire).samples_per_s
                add(f"the same replicas on {fewer} host{'s' if fewer > 1 else ''}", other, f"--nnodes {fewer}")
                break
        add(*_local(predictor, replicas, hosts))
    if plan.strategy.on_servers and hosts > 1:
        more = plan.strategy.server_processes + 1
        other = far_servers(predictor, replicas, hosts, more, Sync()).samples_per_s
        add("one more server", other, f"--join with {more} servers")
        if profile.zero_share > 0.5 or profile.sparse_bytes:
            share = max(0.001, 1 - profile.zero_share)
            other = far_servers(predictor, replicas, hosts, more - 1, Sync(), push_share=share).samples_per_s
            add("pushing only rows that were used", other, "nn.Embedding(sparse=True), --only sparse")
    if profile.batchnorms and whole and replicas > 1 and plan.strategy.batchnorm == "exact":
        other = predictor.mirrored(replicas, hosts, plan.strategy.wire, batchnorm="local").samples_per_s
        add("statistics of each replica's own", other, "--batchnorm local")
    if whole and replicas > 1:
        twice = msgspec.structs.replace(profile, batch_size=2 * profile.batch_size)
        larger = StepPredictor(twice, predictor.calibration, cluster).mirrored(replicas, hosts, plan.strategy.wire)
        add("batches twice as large (another training: mind the learning rate)", larger.samples_per_s, "batch_size")
    return sorted(found, key=lambda lever: -lever.gain)


def _local(predictor: StepPredictor, replicas: int, hosts: int) -> tuple[str, float, str]:
    """Returns the speed of replicas that exchange their parameters every few steps."""
    computed = predictor.compute.of(predictor.profile.batch_size / replicas, replicas // hosts)
    step = local_steps(
        step_cost(predictor, computed),
        every=_LOCAL_STEPS,
        replicas=replicas,
        hosts=hosts,
        link=predictor.cluster.link_bytes_per_s * 0.955,
        latency_s=predictor.calibration.between_hosts_s / 6,
    )
    seconds = simulate(step, steps=3).step_s / _LOCAL_STEPS
    speed = predictor.profile.batch_size / seconds
    return f"exchanging every {_LOCAL_STEPS} steps only (another training)", speed, f"--every {_LOCAL_STEPS}"


def _with_link(cluster: Cluster, times: float) -> Cluster:
    bits = min(MOST_LINK_BITS, cluster.link_bytes_per_s * 8 * times)
    link = f"{bits / 1e9:g}gbit" if bits >= 1e9 else f"{bits / 1e6:g}mbit"
    return msgspec.structs.replace(cluster, link=link)
