"""What a replica's forward and backward take under a strategy: read off what was measured of the script.

Two things were measured: one core beside busy ones, and all cores together, each at several numbers of samples. What
lies between is on a line; what lies beyond is too, and is noted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.plan.cluster import Cluster, described
from paceline.plan.exchange_costs import between
from paceline.profile.values import Profile, ShareTime, Timing


@dataclass
class ShareCompute:
    """Compute times of one script on one cluster. What was asked for beyond the measurements is noted."""

    profile: Profile
    cluster: Cluster
    outside: set[str] = field(default_factory=set)

    def of(self, samples: float, on_host: int) -> Timing:
        """Returns forward and backward of so many samples, by each of `on_host` processes of a host."""
        if self.cluster.device is not None:
            if self.profile.traced:  # there, and so no estimate
                return self._at(samples, max(share.threads for share in self.profile.shares))
            return self._on_described(samples)
        if on_host > self.cluster.cores:  # they share cores, and take turns; while one waits another works
            one = self._threads(samples, 1)
            sharing = on_host / self.cluster.cores
            return one.times(max(1.0, sharing * self.profile.works))
        return self._threads(samples, self.cluster.cores // on_host)

    def _threads(self, samples: float, threads: int) -> Timing:
        measured = max(share.threads for share in self.profile.shares)
        if threads == 1:
            return self._at(samples, 1)
        if threads == measured:
            return self._at(samples, measured)
        one, all_of_them = self._at(samples, 1), self._at(samples, measured)
        if measured == 1:
            self.outside.add(f"replicas of {threads} threads: one was measured")
            return one
        # Amdahl: a part that more threads do not make faster, from what one and what all take.
        alone = (all_of_them.seconds * measured - one.seconds) / (measured - 1)
        alone = min(max(0.0, alone), one.seconds)
        factor = (alone + (one.seconds - alone) / threads) / one.seconds
        if threads > measured:
            self.outside.add(f"replicas of {threads} threads: {measured} were measured")
        wider = 1.0 + 0.1 * abs(threads - measured) / measured
        return Timing(one.seconds * factor, one.low * factor / wider, one.high * factor * wider)

    def _at(self, samples: float, threads: int) -> Timing:
        accumulate = self.profile.accumulate
        measured = [share for share in self.profile.shares if share.threads == threads and (share.busy or threads > 1)]
        found = self.line(measured, samples / accumulate)
        return found.times(accumulate)

    def line(self, shares: list[ShareTime], samples: float) -> Timing:
        """Returns the time of so many samples on the line through those that were measured."""
        points = sorted((float(share.samples), share.timing) for share in shares)
        if samples > 1.01 * points[-1][0]:
            self.outside.add(f"more than {points[-1][0]:.0f} samples at once")
        if samples < points[0][0] and len(points) > 1:
            # On the line from nothing: smaller batches are never faster than what one operator after another takes.
            (left, one), (right, other) = points[0], points[1]
            slope = max(0.0, (other.seconds - one.seconds) / (right - left))
            seconds = max(one.seconds - slope * (left - samples), 0.3 * one.seconds)
            return one.times(seconds / one.seconds)
        return between(points, samples)

    def _on_described(self, samples: float) -> Timing:
        """Returns an estimate: by flops and by bytes, whichever takes longer."""
        device = described(str(self.cluster.device))
        profile, share = self.profile, samples / self.profile.batch_size
        values = sum(layer.activation_bytes for layer in profile.layers)
        moved = 3 * (profile.parameter_bytes + 2 * values * share)
        computed = 0.0 if profile.flops is None else profile.flops * share / (device.flops * device.reached)
        seconds = max(computed, moved / device.memory_bandwidth) + len(profile.layers) * 3 * 10e-6
        self.outside.add(f"{self.cluster.device} is described, not measured")
        return Timing(seconds, 0.6 * seconds, 1.8 * seconds)
