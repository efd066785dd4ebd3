"""Predicts the step of a strategy: what was measured of the script, and what was calibrated of the machine, added up.

    step = a device's share of computing + input + what the exchange takes beyond that + what is left of the link's time

A device's share was measured as such: so many samples, so many threads, busy neighbours; or the devices of a cut, one
by one. An exchange was measured on steps of other models. Nothing here knows how fast a processor is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.exchange.wire_names import WIRES
from paceline.plan.calibration import HEADERS, Calibration
from paceline.plan.cluster import Cluster, described
from paceline.plan.exchange_costs import ExchangeCosts
from paceline.plan.memory_use import MemoryUse
from paceline.plan.prediction import Prediction, TimePart, total
from paceline.plan.share_compute import ShareCompute
from paceline.profile.values import CutTrial, Profile, ShareTime, StepTrial, Timing
from paceline.rules import Async, Rule, Sync
from paceline.strategy import Centralized, Mirrored, Strategy

BUCKET_BYTES = 8 << 20
WIRE_BYTES = dict(zip(WIRES, (4.0, 2.0, 2.0, 1.004), strict=True))  # of a float32
NOTHING = Timing(0.0, 0.0, 0.0)
_ONE = "one"  # the family of one device
_EXCHANGES = 3  # between hosts, that a step of one bucket has: one of these is the bucket's


class StepPredictor:
    """Predictions for one script on one cluster."""

    def __init__(self, profile: Profile, calibration: Calibration, cluster: Cluster) -> None:
        self.profile, self.calibration, self.cluster = profile, calibration, cluster
        self.compute = ShareCompute(profile, cluster)
        self.costs = ExchangeCosts(calibration)
        self._memory = MemoryUse(profile, cluster)
        self._one: Prediction | None = None

    # ── strategies ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def one(self) -> Prediction:
        """One device: what everything else is compared with."""
        if self._one is None:
            self._one = self.mirrored(1, 1)
        return self._one

    def mirrored(self, replicas: int, hosts: int = 1, wire: str = "fp32", batchnorm: str = "exact") -> Prediction:
        """Returns the prediction for mirrored replicas, equally many on each of so many hosts."""
        profile, on_host = self.profile, replicas // hosts
        computed = self._crowded(self.compute.of(profile.batch_size / replicas, on_host))
        norms = profile.batchnorms if batchnorm == "exact" and replicas > 1 else 0
        exchange = self._shared(on_host, norms).times(self.cluster.hosts_a_core)
        link = self._between_hosts(computed, on_host, hosts, wire, norms) if hosts > 1 else NOTHING
        strategy = Mirrored(replicas=replicas, wire=wire if hosts > 1 else "fp32", batchnorm=batchnorm)
        parts = {
            "compute": computed,
            "input": self._input(replicas),
            "exchange": exchange,
            "update": self._update(on_host),
            "link": link,
            "wait": self._waits(computed, replicas, on_host),
        }
        threads = self.cluster.cores if self.cluster.device is None else 1
        name = f"mirrored, {replicas} replicas"
        if replicas == 1:
            name = f"one device, {threads} threads" if threads > 1 else "one device"
        name += f" on {hosts} hosts" if hosts > 1 else ""
        name += f", {wire}" if hosts > 1 and wire != "fp32" else ""
        name += ", local BatchNorm" if batchnorm == "local" else ""
        family = _ONE if replicas == 1 else "mirrored" if hosts == 1 else f"hosts {wire}"
        sent = self._link_bytes(hosts, wire)
        return self.put_together(name, family, strategy, hosts, parts, self._memory.mirrored(replicas, hosts), sent)

    def servers(
        self, replicas: int, servers: int, rule: Rule | None = None, exchange: str = "auto"
    ) -> Prediction | None:
        """Returns the prediction for servers on one host; None if the machine was not calibrated for them."""
        rule = rule or Sync()
        profile = self.profile
        kind = "tcp" if exchange == "tcp" else "servers"
        exchanged = self._on_servers("async" if rule.is_async and kind == "servers" else kind, replicas, servers)
        if exchanged is None:
            return None
        strategy = Centralized(replicas=replicas, servers=servers, rule=rule, exchange=exchange)
        staleness, late = None, 0.0
        update = self._update(servers)
        if isinstance(rule, Async):
            computed = self._crowded(self.compute.of(profile.batch_size, replicas))
            turn = {"compute": computed, "input": self._input(1), "exchange": exchanged, "update": update}
            # Replicas' turns overlap, as far as there are cores; the servers' work is in what was calibrated.
            parts = {what: part.times(1 / min(replicas, self.cluster.cores)) for what, part in turn.items()}
            staleness = replicas - 1.0 if rule.bound is None else min(replicas - 1.0, float(rule.bound))
        else:
            accept = rule.accept if isinstance(rule.accept, int) else replicas
            computed = self._crowded(self.compute.of(profile.batch_size / accept, replicas))
            wait = self._waits(computed, accept, replicas)
            parts = {
                "compute": computed,
                "input": self._input(accept),
                "exchange": exchanged,
                "update": update,
                "wait": wait,
            }
            late = (replicas - accept) / replicas
        words = f", {rule.words}" if rule != Sync() else ""
        over = ", tcp" if exchange == "tcp" else ""
        name = f"{replicas} replicas, {servers} server{'s' if servers > 1 else ''}{words}{over}"
        family = f"{kind} {'async' if rule.is_async else 'sync'}"
        memory = self._memory.servers(replicas, servers)
        sent = 0.0 if exchange != "tcp" else 2.0 * profile.gradient_bytes
        return self.put_together(
            name, family, strategy, 1, parts, memory, sent, staleness=staleness, late=late, exact=rule == Sync()
        )

    def cut(self, trial: CutTrial, replicas: int = 1) -> Prediction | None:
        """Returns the prediction for a model that is cut as was tried, times so many replicas; None if it cannot be."""
        if trial.timing is None:
            return None
        profile, split = self.profile, trial.split
        processes = replicas * split.devices
        samples = profile.batch_size / replicas
        computed = trial.timing
        if samples != trial.samples:  # as much less as one core takes less for so many
            one, fewer = (self.compute.line(self._one_core_shares(), float(n)) for n in (trial.samples, samples))
            computed = computed.times(fewer.seconds / one.seconds)
        computed = computed.times(max(1.0, processes / self.cluster.cores))
        exchange = self._shared(processes, profile.batchnorms if replicas > 1 else 0, cut=replicas == 1)
        strategy = Mirrored(replicas=replicas, split=split)
        kind = type(split).__name__.lower()
        name = f"{split.words}" + (f", {replicas} replicas" if replicas > 1 else "")
        parts = {
            "compute": computed.times(min(1.0, trial.busiest_s / trial.timing.seconds)),
            "wait": computed.times(max(0.0, 1 - trial.busiest_s / trial.timing.seconds)),
            "input": self._input(replicas),
            "exchange": exchange,
            "update": self._update(processes),
        }
        memory = self._memory.cut(trial, replicas)
        return self.put_together(name, kind, strategy, 1, parts, memory, 0.0)

    def memory_of_servers(self, on_host: int, servers: int) -> tuple[int, int]:
        """Returns the memory of a replica and of its host, if servers are elsewhere."""
        of_replica, _ = self._memory.servers(on_host, servers)
        return of_replica, of_replica * on_host

    # ── parts of a step ──────────────────────────────────────────────────────────────────────────────────

    def _crowded(self, computed: Timing) -> Timing:
        """Emulated hosts that share a core take turns; while one waits for something else, another works."""
        return computed.times(max(1.0, self.cluster.hosts_a_core * self.profile.works))

    def _input(self, replicas: int) -> Timing:
        """Loading a replica's samples: in a thread beside the step, on the same core."""
        return NOTHING if self.profile.by_workers else self.profile.load.times(1 / replicas)

    def _update(self, owners: int) -> Timing:
        """What the user's optimizer takes beyond the one that machines are calibrated with."""
        mine, reference = self.profile.update, self.profile.reference_update
        more = (mine.seconds - reference.seconds) / owners
        wide = (mine.high - mine.low + reference.high - reference.low) / 4 / owners
        return Timing(more, more - wide, more + wide)

    def _shared(self, on_host: int, norms: int, *, cut: bool = False) -> Timing:
        """The exchange of processes that share memory. Devices of one cut replica have no gradients to add up."""
        profile = self.profile
        if cut:
            found = self.costs.of("cut", on_host, profile.gradient_bytes, profile.tensors)
            if found is not None:
                return found
        found = self.costs.of("shared", on_host, profile.gradient_bytes, profile.tensors, norms)
        return found if found is not None else NOTHING

    def _on_servers(self, kind: str, replicas: int, servers: int) -> Timing | None:
        profile = self.profile
        known = {curve.servers for curve in self.calibration.curves if curve.exchange == kind}
        if not known:
            return None
        nearest = min(known, key=lambda count: abs(count - servers))
        if nearest != servers:
            self.costs.outside.add(f"{kind} with {servers} servers: {nearest} were calibrated")
        return self.costs.of(kind, replicas, profile.gradient_bytes, profile.tensors, servers=nearest)

    def _waits(self, computed: Timing, replicas: int, on_host: int) -> Timing:
        """Waiting for the slowest of many: what more than the calibrated number of replicas adds."""
        spread = min(computed.spread, self.calibration.step_spread)
        if self.cluster.hosts == 1 or replicas <= max(2, on_host):
            return NOTHING
        factor = spread * (math.sqrt(2 * math.log(replicas)) - math.sqrt(2 * math.log(max(2, on_host))))
        waited = computed.seconds * max(0.0, factor)
        return Timing(waited, 0.5 * waited, 2.0 * waited)

    def _link_bytes(self, hosts: int, wire: str) -> float:
        return 2 * (hosts - 1) / hosts * self.profile.gradient_bytes * WIRE_BYTES[wire] / 4 if hosts > 1 else 0.0

    def _between_hosts(self, computed: Timing, on_host: int, hosts: int, wire: str, norms: int) -> Timing:
        """Returns what is left of the link's work when backward is over: buckets leave while it runs. Statistics of a
        BatchNorm are summed in forward and in backward, which wait for that."""
        profile = self.profile
        sent = self._link_bytes(hosts, wire)
        coding = self._coding(wire, on_host) * 2 * (hosts - 1) / hosts * self.cluster.hosts_a_core
        on_link = sent / (self.cluster.link_bytes_per_s * HEADERS)
        count = max(1, min(64, round(profile.gradient_bytes / (BUCKET_BYTES * on_host))))
        of_bucket = max(coding, on_link + self.calibration.link_overhead * coding) / count
        fixed = self.calibration.between_hosts_s * self.cluster.hosts_a_core
        over = 0.0
        forward = computed.seconds * profile.forward_share
        for bucket in range(count):
            landed = forward + (computed.seconds - forward) * self._landed((bucket + 1) / count)
            # The thread that sends shares its core with backward.
            slowed = bucket / count * coding * self.calibration.link_overhead
            over = max(over, landed + slowed) + of_bucket + (fixed / _EXCHANGES if bucket else 0.0)
        left = max(0.0, over - computed.seconds) + fixed + 2 * norms * fixed / _EXCHANGES
        wide = 0.06 * on_link + 0.15 * coding + 0.3 * fixed
        return Timing(left, max(0.0, left - wide), left + wide)

    def _coding(self, wire: str, on_host: int) -> float:
        """Returns the seconds of an owner's core for coding, sending and adding a gradient between two hosts."""
        profile = self.profile
        there = self.costs.of("collective", 2, profile.gradient_bytes, profile.tensors, wire=wire)
        alone = self.costs.of("shared", 1, profile.gradient_bytes, profile.tensors)
        if there is None or alone is None:
            self.costs.outside.add("exchanges between hosts were not calibrated")
            return 2 * profile.gradient_bytes / self.calibration.memory_bandwidth
        small = [
            self.costs.of(exchange, count, 0.0, profile.tensors, wire=of)
            for exchange, count, of in (("collective", 2, wire), ("shared", 1, "fp32"))
        ]
        fixed = small[0].seconds - small[1].seconds if small[0] is not None and small[1] is not None else 0.0
        return max(0.0, there.seconds - alone.seconds - fixed) / on_host

    def _landed(self, share: float) -> float:
        """Returns the share of backward after which that share of the gradient's bytes is there."""
        for when, there in self.profile.arrivals:
            if there >= share - 1e-9:
                return when
        return 1.0

    def _one_core_shares(self) -> list[ShareTime]:
        return [share for share in self.profile.shares if share.threads == 1 and share.busy]

    # ── putting it together ──────────────────────────────────────────────────────────────────────────────

    def put_together(
        self,
        name: str,
        family: str,
        strategy: Strategy,
        hosts: int,
        parts: dict[str, Timing],
        memory: tuple[int, int],
        link_bytes: float,
        *,
        staleness: float | None = None,
        late: float = 0.0,
        exact: bool = True,
    ) -> Prediction:
        """Returns a prediction from the parts of its step; `memory`: of a device, and of a host."""
        trial = self._trial(strategy, hosts)
        if trial is not None:
            parts = _as_tried(parts, trial)
        step = self._learned(family, trial.timing if trial is not None else total(list(parts.values())))
        shown = {what: part for what, part in parts.items() if abs(part.seconds) > 1e-7}
        samples_per_s = self.profile.batch_size / step.seconds
        of_device, of_host = memory
        memory_bytes = self.cluster.memory_bytes
        if self.cluster.device is not None:
            memory_bytes = described(self.cluster.device).memory_bytes * self.cluster.devices_of_host
        one = samples_per_s if family == _ONE else self.one.samples_per_s
        return Prediction(
            name=name,
            family=family,
            strategy=strategy,
            hosts=hosts,
            devices=strategy.replicas * strategy.devices,
            batch_size=self.profile.batch_size,
            step=step,
            samples_per_s=samples_per_s,
            speedup=samples_per_s / one,
            parts=tuple(TimePart(what, part.seconds) for what, part in shown.items()),
            memory_bytes=of_device,
            host_memory_bytes=of_host,
            fits=of_host <= memory_bytes,
            link_bytes=link_bytes,
            binds=max(shown, key=lambda what: shown[what].seconds),
            run_s=None if self.profile.steps is None else step.seconds * self.profile.steps,
            staleness=staleness,
            late=late,
            outside=tuple(sorted({*self.compute.outside, *self.costs.outside})),
            estimate=self.cluster.device is not None,
            exact=exact,
        )

    def _trial(self, strategy: Strategy, hosts: int) -> StepTrial | None:
        """Returns what was tried of it on this machine, if that is the cluster."""
        cluster, profile = self.cluster, self.profile
        measured = max(share.threads for share in profile.shares)
        if hosts > 1 or cluster.hosts > 1 or cluster.device is not None or cluster.cores != measured:
            return None
        return profile.trial(strategy)

    def _learned(self, family: str, step: Timing) -> Timing:
        """Returns a time as runs have shown that such predictions come out; and as wide as they have been off."""
        spread = self.calibration.step_spread
        found = self.calibration.learned.get(family)
        factor = 1.0
        if found is not None and found.runs:
            trust = found.runs / (found.runs + 2)
            factor = math.exp(found.mean_log * trust)
            spread = math.sqrt(((1 - trust) * spread) ** 2 + (trust * max(0.02, found.spread_log)) ** 2)
        seconds = step.seconds * factor
        below = math.hypot(step.seconds - step.low, 1.65 * spread * step.seconds) * factor
        above = math.hypot(step.high - step.seconds, 1.65 * spread * step.seconds) * factor
        return Timing(seconds, max(0.05 * seconds, seconds - below), seconds + above)


def _as_tried(parts: dict[str, Timing], trial: StepTrial) -> dict[str, Timing]:
    """Returns the parts of a step as it was tried: of computing it is known, what is beyond is divided as predicted."""
    computed = trial.timing.times(trial.computed_s / trial.timing.seconds)
    rest = {what: part.seconds for what, part in parts.items() if what != "compute" and part.seconds > 0}
    left = trial.timing.seconds - computed.seconds
    shares = {what: seconds / sum(rest.values()) for what, seconds in rest.items()} or {"exchange": 1.0}
    beyond = {what: left * seconds for what, seconds in shares.items()}
    return {"compute": computed} | {what: Timing(seconds, seconds, seconds) for what, seconds in beyond.items()}


def fastest(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Returns predictions that fit, the fastest first; of equals those with fewer devices."""
    fitting = [prediction for prediction in predictions if prediction.fits]
    return sorted(fitting, key=lambda found: (-found.samples_per_s, found.devices))
