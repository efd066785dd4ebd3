"""Every way to run a script on a cluster that is worth a prediction."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.exchange.wire_names import WIRES
from paceline.plan.cluster import Cluster
from paceline.plan.far_servers import far_servers
from paceline.plan.predict import StepPredictor
from paceline.plan.prediction import Prediction
from paceline.rules import Async, Rule, Sync

_ALL_UP_TO = 32  # replicas: above, some stand for those between
_SIMULATED_AT_WILL = 64  # replicas: of more, one number of servers has to do


def candidates(predictor: StepPredictor) -> list[Prediction]:
    """Returns the predictions for all of them; one device is the first."""
    found = [predictor.one, *_mirrored(predictor)]
    if predictor.cluster.device is None:
        found += _cuts(predictor)
        found += _servers(predictor)
    if predictor.cluster.hosts > 1:
        found += _far_servers(predictor)
    return found


def replica_counts(cluster: Cluster, batch_size: int) -> list[tuple[int, int]]:
    """Returns (replicas, hosts) of every even way to use some of the devices, on as few hosts as hold them.

    >>> replica_counts(Cluster(hosts=3, cores=2, link="1gbit", memory_bytes=0), 100)
    [(1, 1), (2, 1), (4, 2), (3, 3), (6, 3)]
    """
    a_host = cluster.devices_of_host
    counts: list[tuple[int, int]] = [(count, 1) for count in _some(a_host)]
    for hosts in _some(cluster.hosts)[1:]:
        counts.append((hosts * a_host, hosts))
        if hosts == cluster.hosts:
            counts.append((hosts, hosts))
    return [(count, hosts) for count, hosts in dict.fromkeys(sorted(counts, key=_hosts_first)) if count <= batch_size]


def _hosts_first(entry: tuple[int, int]) -> tuple[int, int]:
    return entry[1], entry[0]


def _some(most: int) -> list[int]:
    """Returns all counts up to some, and then steps of about a sixth."""
    counts, count = [], 1
    while count < most:
        counts.append(count)
        count = count + 1 if count < _ALL_UP_TO else max(count + 1, count * 7 // 6)
    return [*counts, most]


def _mirrored(predictor: StepPredictor) -> Iterator[Prediction]:
    for count, hosts in replica_counts(predictor.cluster, predictor.profile.batch_size):
        if count == 1:
            continue
        for wire in WIRES if hosts > 1 else WIRES[:1]:
            yield predictor.mirrored(count, hosts, wire)
        if predictor.profile.batchnorms:
            yield predictor.mirrored(count, hosts, batchnorm="local")


def _cuts(predictor: StepPredictor) -> Iterator[Prediction]:
    cores, batch_size = predictor.cluster.cores, predictor.profile.batch_size
    for trial in predictor.profile.cuts:
        for replicas in range(1, max(1, cores // trial.split.devices) + 1):
            if replicas <= batch_size and (found := predictor.cut(trial, replicas)) is not None:
                yield found


def _servers(predictor: StepPredictor) -> Iterator[Prediction]:
    cores, batch_size = predictor.cluster.cores, predictor.profile.batch_size
    counts = sorted({count for count in (2, cores // 2, cores - 1, cores) if 2 <= count <= batch_size})
    for count in counts:
        rules: list[Rule] = [Sync(), Async()]
        rules += [Sync(count - 1)] if count > 2 else []
        for rule in rules:
            for servers in (1, 2):
                if (found := predictor.servers(count, servers, rule)) is not None:
                    yield found


def _far_servers(predictor: StepPredictor) -> Iterator[Prediction]:
    """Servers on machines of their own, reached over the link."""
    cluster, batch_size = predictor.cluster, predictor.profile.batch_size
    for hosts in sorted({min(2, cluster.hosts), max(2, cluster.hosts // 2), cluster.hosts}):
        replicas = hosts * cluster.devices_of_host
        few = replicas <= _SIMULATED_AT_WILL
        if replicas > batch_size or (not few and hosts < cluster.hosts):
            continue
        for servers in sorted({1, max(1, hosts // 4), max(1, hosts // 2)} if few else {max(1, hosts // 4)}):
            for rule in (Sync(), Async()):
                yield far_servers(predictor, replicas, hosts, servers, rule)
