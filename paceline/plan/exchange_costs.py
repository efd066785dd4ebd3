"""What an exchange costs, between and beyond the points at which it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.plan.calibration import Calibration, ExchangeCurve, ExchangePoint
from paceline.profile.values import Timing

_BEYOND = 4.0  # times the largest point: further out a figure is no more than a guess, and says so


@dataclass
class ExchangeCosts:
    """The curves of a calibration. What was asked for outside of them is noted."""

    calibration: Calibration
    outside: set[str] = field(default_factory=set)

    def of(
        self,
        exchange: str,
        replicas: int,
        nbytes: float,
        tensors: int,
        norms: int = 0,
        *,
        servers: int = 0,
        wire: str = "fp32",
    ) -> Timing | None:
        """Returns the seconds beyond computing of one step; None if that exchange was not calibrated at all."""
        wire = "bf16" if wire == "fp16" else wire  # the same work
        curves = [
            curve
            for curve in self.calibration.curves
            if curve.exchange == exchange and curve.servers == servers and curve.wire == wire
        ]
        if not curves:
            return None
        curves.sort(key=lambda curve: curve.replicas)
        values = [(curve.replicas, self._on(curve, nbytes, tensors, norms)) for curve in curves]
        if replicas > values[-1][0]:
            self.outside.add(f"{exchange} with more than {values[-1][0]} replicas a host")
        return between(values, replicas)

    def _on(self, curve: ExchangeCurve, nbytes: float, tensors: int, norms: int) -> Timing:
        plain = sorted((point for point in curve.points if point.tensors < 64 and not point.norms), key=_bytes)
        if nbytes > _BEYOND * plain[-1].bytes:
            self.outside.add(f"{curve.exchange} of more than {_BEYOND * plain[-1].bytes / 2**20:.0f} MiB")
        found = between([(point.bytes, point.timing) for point in plain], nbytes)
        extra = 0.0
        for point in curve.points:
            if point.tensors >= 64:
                extra += max(0.0, tensors - plain[0].tensors) * _each(point, plain, point.tensors - plain[0].tensors)
            elif point.norms and norms:
                extra += norms * _each(point, plain, point.norms)
        return Timing(found.seconds + extra, found.low + 0.8 * extra, found.high + 1.2 * extra)


def _bytes(point: ExchangePoint) -> int:
    return point.bytes


def _each(point: ExchangePoint, plain: Sequence[ExchangePoint], count: int) -> float:
    """Returns what each of so many tensors, or norms, adds to the cost of as many bytes."""
    base = between([(one.bytes, one.timing) for one in plain], point.bytes).seconds
    return max(0.0, point.seconds - base) / max(1, count)


def between(points: Sequence[tuple[float, Timing]], at: float) -> Timing:
    """Returns the value on the line through the two nearest points, never below 0; of one point its own.

    >>> between([(1, Timing(1, 1, 1)), (3, Timing(2, 2, 2))], 2).seconds
    1.5
    """
    if len(points) == 1:
        return points[0][1]
    index = next((number for number in range(1, len(points)) if points[number][0] >= at), len(points) - 1)
    (left, one), (right, other) = points[index - 1], points[index]
    if at < left:
        return one
    share = (at - left) / (right - left)

    def mix(first: float, second: float) -> float:
        return max(0.0, first + share * (second - first))

    return Timing(mix(one.seconds, other.seconds), mix(one.low, other.low), mix(one.high, other.high))
