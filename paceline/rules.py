"""A rule says when owners close a step: after which replicas' gradients the parameters are updated.

    Sync()             when all have reported
    Sync(accept=18)    when the first 18 have; whoever comes later is late, and its samples go to a later step
    Sync("auto")       the same, with the number chosen and re-chosen from measured arrival times
    Async()            at each report
    Async(bound=3)     at each report, but nobody runs more than 3 steps ahead of the slowest

A gradient that reports after others have changed the parameters it was computed on is *stale*: by as many steps as
were closed between its pull and its push. `Async` says what is done about that.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import msgspec

from paceline.errors import StrategyError

STALE = ("keep", "drop", "scale", "compensate")
DEFAULT_COMPENSATION = 1.0  # lambda


class Sync(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sync"):
    """A step closes when all replicas, or the first `accept` of them, have reported."""

    accept: int | str | None = None  # None: all; "auto": chosen by measurement

    is_async: ClassVar[Literal[False]] = False

    def __post_init__(self) -> None:
        if isinstance(self.accept, str) and self.accept != "auto":
            raise StrategyError("accept", self.accept, "give a number of replicas, or auto")
        if isinstance(self.accept, int) and self.accept < 1:
            raise StrategyError("accept", self.accept, "give at least 1")

    def check_replicas(self, replicas: int) -> None:
        """Refuse a run of so many replicas if no step could ever close."""
        if isinstance(self.accept, int) and self.accept > replicas:
            raise StrategyError("accept", self.accept, f"give at most the number of replicas, which is {replicas}")

    @property
    def words(self) -> str:
        """
        >>> Sync().words, Sync(18).words
        ('sync', 'sync, accept 18')
        """
        return "sync" if self.accept is None else f"sync, accept {self.accept}"

    def flags(self) -> list[str]:
        """What `paceline run` is given to have this rule."""
        return [] if self.accept is None else ["--accept", str(self.accept)]


class Async(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="async"):
    """A step closes at each report."""

    bound: int | None = None  # how many steps a replica may be ahead of the slowest
    stale: str = "keep"  # keep · drop:N beyond N · scale by 1/staleness · compensate[:lambda]
    lr: float = 1.0  # factor on the learning rate

    is_async: ClassVar[Literal[True]] = True

    def __post_init__(self) -> None:
        if self.bound is not None and not (isinstance(self.bound, int) and self.bound >= 0):
            raise StrategyError("bounded", self.bound, "give a number of steps from 0 up")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise StrategyError("stale-lr", self.lr, "give a factor above 0, such as 0.5")
        _parse_stale(self.stale)

    def check_replicas(self, replicas: int) -> None:
        """A step closes at each report, however many replicas there are."""

    @property
    def words(self) -> str:
        """
        >>> Async().words, Async(bound=3, stale="drop:8").words
        ('async', 'async, bound 3, stale drop:8')
        """
        said = [f"{name} {value}" for name, value in self._changed().items()]
        return ", ".join(["async", *said])

    def flags(self) -> list[str]:
        """What `paceline run` is given to have this rule."""
        named = {"bound": "--bounded", "stale": "--stale", "lr": "--stale-lr"}
        given = [word for name, value in self._changed().items() for word in (named[name], str(value))]
        return given if self.bound is not None else ["--async", *given]

    def _changed(self) -> dict[str, object]:
        """The fields that are not at their default."""
        default = msgspec.structs.asdict(Async())
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value != default[name]}

    @property
    def drop_beyond(self) -> float:
        """The largest staleness that is still used."""
        kind, number = _parse_stale(self.stale)
        return number if kind == "drop" else math.inf

    @property
    def compensation(self) -> float:
        """How strongly a stale gradient is corrected for what has changed since (lambda); 0: not at all."""
        kind, number = _parse_stale(self.stale)
        return number if kind == "compensate" else 0.0

    def weight(self, staleness: int) -> float:
        """What a gradient of this staleness counts."""
        return 1.0 / max(1, staleness) if _parse_stale(self.stale)[0] == "scale" else 1.0


Rule = Sync | Async


def _parse_stale(text: str) -> tuple[str, float]:
    """
    >>> _parse_stale("drop:8"), _parse_stale("scale")
    (('drop', 8.0), ('scale', 0.0))
    """
    kind, colon, given = text.partition(":")
    if kind not in STALE or (colon and kind in ("keep", "scale")):
        raise StrategyError("stale", text, "give one of keep, drop:N, scale, compensate, compensate:LAMBDA")
    if kind == "drop" and not (given.isascii() and given.isdecimal()):
        raise StrategyError("stale", text, "give drop:N with a whole number of steps, such as drop:8")
    if kind == "compensate":
        try:
            number = float(given) if colon else DEFAULT_COMPENSATION
        except ValueError:
            number = -1.0
        if not (number > 0 and math.isfinite(number)):
            raise StrategyError("stale", text, "give compensate:LAMBDA with a number above 0, such as compensate:0.5")
        return kind, number
    return kind, float(given) if given else 0.0
