"""Servers on machines of their own, reached over the cluster's links: the order of pulls and pushes matters, so this is
simulated, step by step as the description of it says."""

from __future__ import annotations

import msgspec

from paceline.plan.compute_times import Fixed, Lognormal
from paceline.plan.predict import NOTHING, StepPredictor
from paceline.plan.prediction import Prediction
from paceline.plan.servers_step import servers_step
from paceline.plan.simulate import simulate
from paceline.plan.step import LayerCost, StepCost
from paceline.profile.values import Timing
from paceline.rules import Rule
from paceline.strategy import Centralized

_RUNS_OF_LAYERS = 8  # into which backward is cut
_TURNS = 400  # simulated of all replicas together, about
_MEASURED_BYTES = 16.0 * 2**20  # of a model at which what a byte costs is read off
_MESSAGES_OF_TWO = 8  # of two replicas in a step: to ask, to pull, to push, to report
_MESSAGES = 6  # on the way of a step between hosts that were calibrated
_PUSHES = 512  # of all of them in a step, at most


def far_servers(
    predictor: StepPredictor, replicas: int, hosts: int, servers: int, rule: Rule, *, push_share: float = 1.0
) -> Prediction:
    """Returns the prediction for so many replicas on so many hosts. `push_share`: of the gradient, what is pushed."""
    profile, cluster, calibration = predictor.profile, predictor.cluster, predictor.calibration
    accept = rule.accept if not rule.is_async and isinstance(rule.accept, int) else replicas
    samples = profile.batch_size if rule.is_async else profile.batch_size / accept
    computed = predictor.compute.of(samples, replicas // hosts)
    cost = step_cost(predictor, computed)
    message_s, byte_s = _of_a_server(predictor)
    cost = msgspec.structs.replace(cost, sum_s=max(cost.sum_s, byte_s * cost.bytes * push_share))
    description = servers_step(
        cost,
        replicas=replicas,
        servers=servers,
        hosts=hosts,
        link=cluster.link_bytes_per_s * 0.955,
        rule=rule,
        latency_s=calibration.between_hosts_s / _MESSAGES,
        message_s=message_s,
        pull_bytes=cost.bytes * push_share,
        push_bytes=cost.bytes * push_share,
        most_buckets=max(2, min(16, _PUSHES // replicas)),
    )
    spread = min(0.3, max(0.01, computed.spread))
    steps = max(3, _TURNS // replicas)
    found = simulate(description, times=Lognormal(spread) if replicas <= 64 else Fixed(), steps=steps)
    seconds = found.step_s
    low, high = (seconds * (computed.low / computed.seconds), seconds * (computed.high / computed.seconds))
    shares = {kind: Timing(share * seconds, share * low, share * high) for kind, share in found.path.items() if share}
    parts = {"link" if kind == "exchange" else kind: part for kind, part in shares.items()} or {"compute": NOTHING}
    words = f", {rule.words}" if rule.is_async or accept != replicas else ""
    plural = "s" if servers > 1 else ""
    name = f"{replicas} replicas on {hosts} hosts, {servers} server{plural}{words}"
    own = predictor.memory_of_servers(replicas // hosts, servers)
    strategy = Centralized(replicas=replicas, servers=servers, rule=rule)
    predictor.costs.outside.add("servers on other machines are simulated, not calibrated")
    return predictor.put_together(
        name,
        f"far servers {'async' if rule.is_async else 'sync'}",
        strategy,
        hosts,
        parts,
        own,
        2.0 * cost.bytes * push_share * replicas / hosts,
        staleness=found.staleness.mean if found.staleness is not None else None,
        late=found.late,
        exact=not rule.is_async and accept == replicas,
    )


def _of_a_server(predictor: StepPredictor) -> tuple[float, float]:
    """Returns the seconds of a server's core for a message, and for a byte of a gradient: as two replicas that
    used one over TLS, or over TCP, have shown."""
    profile, costs = predictor.profile, predictor.costs
    for exchange in ("tls", "tcp"):
        small, large = (costs.of(exchange, 2, nbytes, profile.tensors, servers=1) for nbytes in (0.0, _MEASURED_BYTES))
        if small is not None and large is not None:
            return small.seconds / _MESSAGES_OF_TWO, max(0.0, large.seconds - small.seconds) / 2 / _MEASURED_BYTES
    predictor.costs.outside.add("servers over a network were not calibrated")
    return 0.0, 0.0


def step_cost(predictor: StepPredictor, computed: Timing) -> StepCost:
    """Returns what a step costs, for the simulator: backward in runs, each with the gradients that are there then."""
    profile = predictor.profile
    forward = computed.seconds * profile.forward_share
    backward = computed.seconds - forward
    runs: list[LayerCost] = []
    there = 0.0
    for number in range(_RUNS_OF_LAYERS):
        until = (number + 1) / _RUNS_OF_LAYERS
        share = max((share for when, share in profile.arrivals if when <= until), default=0.0)
        share = 1.0 if number == _RUNS_OF_LAYERS - 1 else share
        runs.append(
            LayerCost(forward / _RUNS_OF_LAYERS, backward / _RUNS_OF_LAYERS, (share - there) * profile.gradient_bytes)
        )
        there = share
    bandwidth = predictor.calibration.memory_bandwidth
    return StepCost(
        tuple(reversed(runs)),
        sum_s=3 * profile.gradient_bytes / bandwidth,
        update_s=profile.update.seconds,
    )
