"""The whole answer to "how should I run this": made once, shown as a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from paceline.plan.calibration import Calibration
from paceline.plan.candidates import candidates
from paceline.plan.cluster import Cluster
from paceline.plan.predict import StepPredictor, fastest
from paceline.plan.prediction import Prediction
from paceline.plan.reasons import choose, reasons
from paceline.plan.saturation import Lever, SpeedupCurve, levers, speedup_curve
from paceline.profile.values import Profile


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """Which strategy, how many devices, where it saturates, why."""

    script: str
    cluster: Cluster
    best: Prediction
    ordered: tuple[Prediction, ...]  # those that fit, the fastest first
    one: Prediction
    considered: int
    why: tuple[str, ...]
    curves: tuple[SpeedupCurve, ...]
    levers: tuple[Lever, ...]
    profile: Profile
    left_out: tuple[str, ...]  # cuts that the model does not allow, and what there was no time for


def make_report(profile: Profile, calibration: Calibration, cluster: Cluster) -> PlanReport:
    """Returns the answer for one script on one cluster."""
    predictor = StepPredictor(profile, calibration, cluster)
    everything = candidates(predictor)
    ordered = fastest(everything)
    curves = [speedup_curve(predictor)]
    if cluster.hosts > 1:
        curves.append(speedup_curve(predictor, "bf16"))
    one = predictor.one
    best = choose(ordered) if ordered else one
    refused = [f"{trial.split.words}: {trial.why_not}" for trial in profile.cuts if trial.why_not is not None]
    return PlanReport(
        script=profile.script,
        cluster=cluster,
        best=best,
        ordered=tuple(ordered),
        one=one,
        considered=len(everything),
        why=tuple(reasons(predictor, best, everything, curves[0])),
        curves=tuple(curves),
        levers=tuple(levers(predictor, best, everything)),
        profile=profile,
        left_out=(*refused, *profile.left_out),
    )


def few(ordered: Sequence[Prediction], best: Prediction, count: int) -> list[Prediction]:
    """Returns the best few to show: the chosen one, then the fastest, of each family at most two."""
    shown = [best]
    families: dict[str, int] = {best.family: 1}
    for plan in ordered:
        if len(shown) >= count:
            break
        if plan is not best and plan not in shown and families.get(plan.family, 0) < 2:
            shown.append(plan)
            families[plan.family] = families.get(plan.family, 0) + 1
    return shown
