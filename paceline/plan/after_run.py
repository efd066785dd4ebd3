"""After a run: what was predicted beside what was measured, and what predictions learn from that.

A run of a script that was planned (its profile is kept until it changes) is one more measurement of its way of
distributing. The calibration keeps, for every family of strategies, by what predictions were off on average and how
much that varies: the next ones are corrected by it, the more the more runs there were, and their intervals are as
wide as it shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from paceline.errors import InvalidInput
from paceline.exchange.wire_names import WIRES
from paceline.launch.cores import allowed_cores
from paceline.launch.emulate import Emulation
from paceline.plan.calibration import Calibration, LearnedFactor, default_path, fingerprint, read, write
from paceline.plan.checking import step_times, undisturbed
from paceline.plan.cluster import Cluster
from paceline.plan.kept_profiles import kept_profile
from paceline.plan.predict import StepPredictor
from paceline.plan.prediction import Prediction
from paceline.strategy import Strategy

LEAST_STEPS = 10  # that a run has to show before it is learned from
REMEMBERED = 30  # runs: an older one counts less and less
_FAR_OFF = math.log(4.0)  # such a run was disturbed, or is of another kind: nothing is learned from it


class SideBySide(msgspec.Struct, frozen=True):
    """A step as it was, and as it was predicted."""

    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float

    @property
    def words(self) -> str:
        """Returns it as a summary shows it.

        >>> SideBySide(0.0102, 0.01, 0.008, 0.012).words
        'a step took 10.2 ms, predicted 10 ms (8 – 12 ms): off by -2%'
        """
        measured, predicted, low, high = (
            f"{1000 * seconds:.3g}" for seconds in (self.measured_s, self.predicted_s, self.low_s, self.high_s)
        )
        off = self.predicted_s / self.measured_s - 1
        return f"a step took {measured} ms, predicted {predicted} ms ({low} – {high} ms): off by {off:+.0%}"


def cluster_here(calibration: Calibration, emulate: str | None, hosts: int = 1) -> Cluster | None:
    """Returns what a run has of this machine; None if it is on several real ones, whose links nobody has described."""
    cores = len(allowed_cores())
    if emulate is not None:
        emulation = Emulation.parse(emulate, may_join=True)
        return Cluster(
            hosts=emulation.hosts,
            link=emulation.link,
            cores=max(1, cores),
            memory_bytes=calibration.memory_bytes // emulation.hosts,
            emulated=True,
            hosts_a_core=max(1.0, emulation.hosts / calibration.cores),
        )
    return Cluster(hosts=1, cores=cores, memory_bytes=calibration.memory_bytes) if hosts == 1 else None


def predict_strategy(predictor: StepPredictor, strategy: Strategy, hosts: int) -> Prediction | None:
    """Returns the prediction for a strategy as it was given; None if nothing is known of it."""
    if strategy.on_servers:
        if strategy.split is not None or strategy.in_graph or strategy.durable or hosts > 1:
            return None
        return predictor.servers(strategy.replicas, strategy.servers, strategy.rule, strategy.exchange)
    if strategy.table_servers or strategy.exchange == "collective" or strategy.steps_locally or strategy.overlap:
        return None
    if strategy.wire not in WIRES:
        return None
    if strategy.split is not None:
        trial = next((trial for trial in predictor.profile.cuts if trial.split == strategy.split), None)
        return None if trial is None or hosts > 1 else predictor.cut(trial, strategy.replicas)
    return predictor.mirrored(strategy.replicas, hosts, strategy.wire, strategy.batchnorm)


def compare_with_prediction(
    run_folder: Path,
    strategy: Strategy,
    hosts: int,
    script: str,
    arguments: Sequence[str],
    *,
    module: bool,
    emulate: str | None,
) -> SideBySide | None:
    """Returns measured and predicted of a run that is over, and learns from it; None if the script was not planned."""
    lasted = step_times(run_folder)
    profile = kept_profile(script, arguments, module=module)
    if profile is None or len(lasted) < LEAST_STEPS or not default_path().exists():
        return None
    try:
        calibration = read(default_path())
    except InvalidInput:  # a run is over: that its summary lacks a line is no reason to fail it
        return None
    cluster = cluster_here(calibration, emulate, hosts)
    if cluster is None or calibration.machine != fingerprint():
        return None
    plan = predict_strategy(StepPredictor(profile, calibration, cluster), strategy, hosts)
    plain = msgspec.structs.replace(calibration, learned={})
    unlearned = predict_strategy(StepPredictor(profile, plain, cluster), strategy, hosts)
    if plan is None or unlearned is None:
        return None
    turns = strategy.replicas if strategy.on_servers and strategy.rule.is_async else 1
    measured = undisturbed(sorted(lasted)) / turns
    with suppress(OSError):  # a full disk
        write(learn(calibration, plan.family, measured / unlearned.step.seconds), default_path())
    return SideBySide(measured, plan.step.seconds, plan.step.low, plan.step.high)


def learn(calibration: Calibration, family: str, ratio: float) -> Calibration:
    """Returns the calibration after one more run, which took `ratio` times as long as predicted without learning."""
    log = math.log(ratio)
    if abs(log) > _FAR_OFF:
        return calibration
    before = calibration.learned.get(family, LearnedFactor(0, 0.0, 0.0))
    count = min(before.runs, REMEMBERED) + 1
    mean = before.mean_log + (log - before.mean_log) / count
    square = before.spread_log**2 + ((log - before.mean_log) * (log - mean) - before.spread_log**2) / count
    factor = LearnedFactor(before.runs + 1, mean, math.sqrt(max(0.0, square)))
    return msgspec.structs.replace(calibration, learned={**calibration.learned, family: factor})
