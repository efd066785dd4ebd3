"""Why a plan is the best, in words: each sentence says a figure and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.plan.memory_use import MemoryUse
from paceline.plan.predict import StepPredictor
from paceline.plan.prediction import Prediction
from paceline.plan.saturation import SpeedupCurve
from paceline.split.values import Layout, Split, Stages, Tiles, Wavefront

_CLOSE = 1.03  # faster by less than that is no reason to take more devices
_WORDS = {
    "link": "the link",
    "exchange": "the exchange",
    "update": "the optimizer",
    "wait": "waiting for others",
    "input": "loading samples",
    "compute": "computing",
}


def choose(ordered: Sequence[Prediction]) -> Prediction:
    """Returns the plan to take: the fastest that trains as one process does; of those hardly slower, fewest devices."""
    exact = [plan for plan in ordered if plan.exact and plan.strategy.wire == "fp32"] or list(ordered)
    exact = [plan for plan in exact if plan.strategy.on_servers or plan.strategy.batchnorm == "exact"] or exact
    top = exact[0]
    near = [plan for plan in exact if plan.samples_per_s * _CLOSE >= top.samples_per_s]
    return min(near, key=lambda plan: (plan.devices, -plan.samples_per_s))


def reasons(
    predictor: StepPredictor, best: Prediction, everything: Sequence[Prediction], curve: SpeedupCurve
) -> list[str]:
    """Returns the sentences for the plan that was chosen."""
    found = [_about_computing(predictor, best)]
    if best.devices == 1:
        found += _why_one(predictor, everything)
    elif best.strategy.split is not None:
        found += [_why_cut(predictor, best.strategy.split, everything, best)]
    else:
        found += _why_replicas(best, everything)
    if predictor.cluster.devices > 1:
        found.append(_where_it_ends(curve))
    if not best.fits or not all(plan.fits for plan in everything):
        found += _memory(predictor, everything)
    if best.estimate:
        found.append("The device is described and not measured: every figure here is an estimate.")
    return found


def _about_computing(predictor: StepPredictor, best: Prediction) -> str:
    profile = predictor.profile
    shares = {part.name: part.seconds / best.step.seconds for part in best.parts}
    compute = f"{shares.get('compute', 0.0):.0%} of the step is computing"
    flops = profile.flops_per_weight
    of_weight = f", {flops:,.0f} flops a weight and sample" if flops is not None else ""
    over = profile.weights_over_activations
    ratio = f"{over:.3g} times" if over >= 1 else f"1/{1 / max(over, 1e-9):.3g} of"
    return f"{compute}{of_weight}; the weights are {ratio} what the layers hand on, at a batch of {profile.batch_size}."


def _why_one(predictor: StepPredictor, everything: Sequence[Prediction]) -> list[str]:
    others = [plan for plan in everything if plan.devices > 1 and plan.exact and plan.strategy.wire == "fp32"]
    if not others:
        return ["There is one device."]
    nearest = max(others, key=lambda plan: plan.samples_per_s)
    one = predictor.one
    beyond = [part for part in nearest.parts if part.name not in ("compute",)]
    taken = max(beyond, key=lambda part: part.seconds, default=None)
    why = f", of which {_WORDS[taken.name]} takes {_ms(taken.seconds)}" if taken is not None else ""
    slower = "takes" if nearest.samples_per_s <= one.samples_per_s else "gains next to nothing with"
    return [
        f"Use one device: a step takes {_ms(one.step.seconds)} there; the best of several, {nearest.name}, {slower} "
        f"{_ms(nearest.step.seconds)}{why}."
    ]


def _why_replicas(best: Prediction, everything: Sequence[Prediction]) -> list[str]:
    beyond = sum(part.seconds for part in best.parts if part.name not in ("compute", "input"))
    cuts = [plan for plan in everything if plan.strategy.split is not None and plan.devices == best.devices]
    words = "replicas with servers" if best.strategy.on_servers else "replicas"
    sentence = (
        f"Data parallel: {words} compute {best.batch_size // best.strategy.replicas} samples each, and all that is "
        f"exchanged adds {_ms(beyond)} to a step of {_ms(best.step.seconds)}"
    )
    if cuts:
        nearest = max(cuts, key=lambda plan: plan.samples_per_s)
        sentence += f"; cut by {nearest.name} it would take {_ms(nearest.step.seconds)}"
    return [sentence + "."]


def _why_cut(predictor: StepPredictor, split: Split, everything: Sequence[Prediction], best: Prediction) -> str:
    profile = predictor.profile
    replicas = [
        plan
        for plan in everything
        if plan.strategy.split is None and plan.devices == best.devices and not plan.strategy.on_servers
    ]
    nearest = max(replicas, key=lambda plan: plan.samples_per_s, default=None)
    against = ""
    if nearest is not None:
        exchanged = sum(part.seconds for part in nearest.parts if part.name in ("exchange", "update", "link"))
        against = (
            f"; {nearest.name} would take {_ms(nearest.step.seconds)}, {_ms(exchanged)} of it for exchanging a "
            f"gradient of {_bytes(profile.gradient_bytes)}"
        )
    if isinstance(split, Layout):
        what = f"every device has a part of {', '.join(split.layout)}, and activations are exchanged instead of weights"
    elif isinstance(split, Stages):
        what = f"layers go to {split.stages} devices, and {split.micro_batches} micro-batches keep them busy"
    elif isinstance(split, Tiles):
        what = "every device has a part of the image, and only edges are exchanged"
    else:
        assert isinstance(split, Wavefront)
        what = "layers work at different times of the sequence at once"
    return f"Model parallel: {what}, so a step takes {_ms(best.step.seconds)}{against}."


def _where_it_ends(curve: SpeedupCurve) -> str:
    at, last = curve.saturates, curve.points[-1]
    many = f"{at.devices} device{'s' if at.devices > 1 else ''}"
    if at.devices == last.devices:
        return f"Replicas still pay at {many}: {at.speedup:.1f}×, as far as there are devices here."
    beyond = next(point for point in curve.points if point.devices > at.devices)
    binds = f"{_WORDS[beyond.binds]} binds"
    if beyond.binds == "compute":  # and yet they are no faster
        binds = "a smaller share of the batch takes hardly less time to compute"
    after = f"more only slows ({last.devices}: {last.speedup:.1f}×)" if curve.falls else "more gains next to nothing"
    if at.devices == 1:
        return f"More replicas do not pay at all: from {beyond.devices} on {binds} ({beyond.speedup:.2f}×)."
    return f"Saturation at {many}: {at.speedup:.1f}×; from {beyond.devices} on {binds}, {after}."


def _memory(predictor: StepPredictor, everything: Sequence[Prediction]) -> list[str]:
    where = MemoryUse(predictor.profile, predictor.cluster).where(predictor.cluster.devices_of_host, 1)
    largest = ", ".join(f"{name} {_bytes(size)}" for name, size in where[:3])
    fitting = [plan for plan in everything if plan.fits]
    left_out = len(everything) - len(fitting)
    todo = "micro-batches (Trainer(accumulate=…)), fewer replicas a host, or a cut model (--mesh, --stages)"
    return [
        f"{left_out} of {len(everything)} plans do not fit into memory: {largest} of each replica. What helps: {todo}."
    ]


def _ms(seconds: float) -> str:
    """
    >>> _ms(0.0123), _ms(2.5)
    ('12.3 ms', '2.5 s')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _bytes(size: float) -> str:
    """
    >>> _bytes(3 * 2**20), _bytes(100)
    ('3 MiB', '0.1 KiB')
    """
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size / 2**10:.1g} KiB" if size < 2**10 else f"{size / 2**10:.3g} KiB"
