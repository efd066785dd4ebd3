"""A script's profile and a machine's calibration that nobody measured: round figures, for what follows from them."""

from __future__ import annotations

from paceline.plan.calibration import Calibration, ExchangeCurve, ExchangePoint, fingerprint
from paceline.profile.values import CutTrial, LayerTime, Profile, ShareTime, Timing
from paceline.split.values import Layout, Stages

MIB = 2**20


def sure(seconds: float) -> Timing:
    """A time that was always the same, to five hundredths."""
    return Timing(seconds, 0.95 * seconds, 1.05 * seconds)


def curve(exchange: str, replicas: int, ms_a_mib: float, *, servers: int = 0, wire: str = "fp32") -> ExchangeCurve:
    """0.5 ms, and so many for every MiB."""
    points = []
    for mib in (0, 1, 16, 64):
        found = sure((0.5 + ms_a_mib * mib) / 1000)
        points.append(ExchangePoint(mib * MIB, found.seconds, found.low, found.high))
    return ExchangeCurve(exchange=exchange, replicas=replicas, servers=servers, wire=wire, points=tuple(points))


def calibration(**changes: object) -> Calibration:
    given: dict[str, object] = {
        "machine": fingerprint(),
        "made": "2026-11-17",
        "cores": 2,
        "memory_bytes": 16 * 2**30,
        "memory_bandwidth": 10e9,
        "memory_bandwidth_all": 15e9,
        "neighbour_compute": 1.05,
        "neighbour_memory": 1.3,
        "mailbox_s": 50e-6,
        "curves": (
            *(curve("shared", count, 0.2 + 0.05 * count) for count in (1, 2, 4)),
            *(curve("collective", 2, cost, wire=wire) for wire, cost in (("fp32", 1.2), ("bf16", 1.5), ("int8", 1.8))),
            *(curve("servers", count, 0.4 * count, servers=servers) for count in (1, 2) for servers in (1, 2)),
            curve("cut", 2, 0.2),
            curve("async", 2, 0.5, servers=1),
            *(curve("tcp", count, 2.0 * count, servers=1) for count in (1, 2)),
        ),
    }
    return Calibration(**{**given, **changes})  # type: ignore[arg-type]


def profile(
    *,
    parameters: int = 1_000_000,
    ms_a_sample: float = 1.0,
    batch_size: int = 64,
    fixed_ms: float = 0.5,
    two_threads: float = 0.55,
    **changes: object,
) -> Profile:
    """A script whose step is so many milliseconds a sample on one core, and `two_threads` of that on two."""
    shares = []
    samples = batch_size
    while samples:
        seconds = (fixed_ms + ms_a_sample * samples) / 1000
        shares.append(ShareTime(samples=samples, threads=1, busy=True, timing=sure(seconds)))
        shares.append(ShareTime(samples=samples, threads=2, busy=False, timing=sure(two_threads * seconds)))
        samples //= 2
    shares.append(ShareTime(samples=batch_size, threads=1, busy=False, timing=shares[0].timing))
    nbytes = 4 * parameters
    given: dict[str, object] = {
        "script": "train.py",
        "machine": fingerprint(),
        "batch_size": batch_size,
        "samples": 100 * batch_size,
        "steps": 1000,
        "accumulate": 1,
        "parameters": parameters,
        "parameter_bytes": nbytes,
        "gradient_bytes": nbytes,
        "tensors": 8,
        "sparse_bytes": 0,
        "sparse_table_bytes": 0,
        "zero_share": 0.0,
        "optimizer": "AdamW",
        "state_bytes": 2 * nbytes,
        "update": sure(nbytes / 5e9),
        "reference_update": sure(nbytes / 8e9),
        "load": sure(1e-5),
        "by_workers": False,
        "forward_share": 1 / 3,
        "arrivals": tuple((share / 8, share / 8) for share in range(1, 9)),
        "shares": tuple(shares),
        "layers": (
            LayerTime(
                name="0",
                kind="Linear",
                parameters=parameters,
                activation_bytes=batch_size * 4096,
                forward_s=0.01,
                backward_s=0.02,
            ),
        ),
        "activation_bytes": batch_size * 10_000,
        "flops": 6.0 * parameters * batch_size,
        "batchnorms": 0,
    }
    return Profile(**{**given, **changes})  # type: ignore[arg-type]


def cut(split: Layout | Stages, profile: Profile, factor: float) -> CutTrial:
    """A cut whose step takes so much of what one core takes."""
    whole = next(share for share in profile.shares if not share.busy and share.threads == 1)
    return CutTrial(
        split=split,
        samples=profile.batch_size,
        timing=whole.timing.times(factor),
        busiest_s=0.9 * factor * whole.timing.seconds,
        parameter_bytes=profile.parameter_bytes // split.devices,
    )
