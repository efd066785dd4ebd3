"""When a run has done enough: a metric has reached its target, or time or steps are used up.

    --until "accuracy>=0.97"   --longest 60s   --most-steps 1000

A metric is what a script tells by `trainer.evaluate(…, name="accuracy")` or `trainer.log(accuracy=…)`. Of an evaluation
that gives several numbers, `validation/accuracy` is one; `accuracy` alone means it too.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.errors import StrategyError, nearest_first

NOT_REACHED = 3  # exit code of a run that ended without having reached its target

_HOLDS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_TARGET = re.compile(r"\s*(?P<metric>[^<>=]+?)\s*(?P<sign>>=|<=|>|<)\s*(?P<value>\S+)\s*")
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]*)?)(?P<unit>[smh]?)")


@dataclass(frozen=True)
class Target:
    """What a metric has to come to.

    >>> target = Target.parse("accuracy >= 0.97")
    >>> str(target), target.holds(0.97), target.holds(0.5), target.better(0.5, 0.6)
    ('accuracy>=0.97', True, False, 0.6)
    """

    metric: str
    sign: str
    value: float

    @classmethod
    def parse(cls, text: str, field: str = "until") -> Target:
        """Read what stands after `--until`."""
        found = _TARGET.fullmatch(text)
        with contextlib.suppress(ValueError):
            if found and math.isfinite(value := float(found["value"])):
                return cls(found["metric"], found["sign"], value)
        raise StrategyError(field, text[:200], 'give a metric, >= or <=, and a number, such as "accuracy>=0.97"')

    def __str__(self) -> str:
        return f"{self.metric}{self.sign}{self.value:.15g}"

    def is_for(self, name: str) -> bool:
        """Whether that is the metric."""
        return is_metric(self.metric, name)

    def holds(self, value: float) -> bool:
        return bool(_HOLDS[self.sign](value, self.value))

    @property
    def upwards(self) -> bool:
        """Whether larger values are better."""
        return ">" in self.sign

    def better(self, one: float | None, other: float) -> float:
        """Of two values, the one that is nearer to the target or further beyond it."""
        if one is None or math.isnan(one):
            return other
        return max(one, other) if self.upwards else min(one, other)

    def never_seen(self, names: Iterable[str]) -> str:
        """Why a run that told these names could not reach it, and what to do."""
        return never_told(self.metric, names, "in --until")


def is_metric(metric: str, name: str) -> bool:
    """Whether what is told under this name is the metric that somebody asks for.

    >>> is_metric("accuracy", "validation/accuracy"), is_metric("test/accuracy", "validation/accuracy")
    (True, False)
    """
    return name == metric or name.rpartition("/")[2] == metric


def never_told(metric: str, names: Iterable[str], where: str) -> str:
    """Why nothing can be said of a metric, of a run that told these names, and what to do. `where`: it is asked for."""
    known = nearest_first(metric, sorted(names))
    if known:
        return f"{metric} was never told: the script tells {', '.join(known)}; ask for one of them {where}"
    return (
        f"{metric} was never told: have the script call "
        f"trainer.evaluate(dataset, metric, name={metric!r}) or trainer.log({_keyword(metric)})"
    )


def _keyword(name: str) -> str:
    return f"{name}=value" if name.isidentifier() else f"{{{name!r}: value}}"


def read_time(field: str, text: str) -> float:
    """
    >>> read_time("longest", "60s"), read_time("longest", "1.5m"), read_time("longest", "20")
    (60.0, 90.0, 20.0)
    """
    found = _TIME.fullmatch(text)
    seconds = float(found["number"]) * _UNITS_S[found["unit"]] if found else 0.0
    if not 0 < seconds <= 1e7:
        raise StrategyError(field, text[:200], "give a time above 0, such as 60s, 5m or 2h")
    return seconds
