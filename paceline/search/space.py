"""What may be tried: a range or some values for each parameter, as they are typed.

lr=log:1e-4..1e-1      a number from a range, evenly in its logarithm
dropout=0..0.5         evenly
dropout=0..0.5:0.1     in steps of 0.1
layers=1..8            both ends are whole, and so is the number
width=64,128,256       one of these; words too
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import InvalidInput
from paceline.trial_values import TrialValues, Value

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

RESERVED = ("fold", "folder", "trial")  # what else may stand in braces in a script's arguments
MOST_GRID = 1_000_000

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_HOW = "such as lr=log:1e-4..1e-1, dropout=0..0.5, layers=1..8 or width=64,128,256"


@dataclass(frozen=True)
class NumberRange:
    """Numbers between two, both included; whole ones if both are."""

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = None

    def distribution(self) -> BaseDistribution:
        from optuna.distributions import FloatDistribution, IntDistribution

        if isinstance(self.low, int) and isinstance(self.high, int):
            return IntDistribution(self.low, self.high, log=self.log, step=int(self.step or 1))
        return FloatDistribution(float(self.low), float(self.high), log=self.log, step=self.step)

    def grid(self) -> list[Value] | None:
        """All of its values, if there are so few that one can speak of all."""
        step = self.step or (1 if isinstance(self.low, int) and isinstance(self.high, int) else None)
        if step is None or self.log or (count := round((self.high - self.low) / step) + 1) > MOST_GRID:
            return None
        return [self.low + number * step for number in range(count)]


@dataclass(frozen=True)
class Choices:
    """Some values, one of which is taken."""

    values: tuple[Value, ...]

    def distribution(self) -> BaseDistribution:
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.values)

    def grid(self) -> list[Value] | None:
        return list(self.values)


@dataclass(frozen=True)
class SearchedParameter:
    """A parameter that is searched for; its name, as it is in `pl.trial()`."""

    name: str
    typed: str
    values: NumberRange | Choices

    @classmethod
    def parse(cls, text: str) -> SearchedParameter:
        """
        >>> SearchedParameter.parse("lr=log:1e-4..1e-1").values
        NumberRange(low=0.0001, high=0.1, log=True, step=None)
        >>> SearchedParameter.parse("batch-size=64,128").name
        'batch_size'
        """
        name, equals, values = text.partition("=")
        if not (equals and _NAME.fullmatch(name)):
            raise InvalidInput("param", text[:200], f"give a name, = and what to try, {_HOW}")
        name = name.replace("-", "_")
        if name in RESERVED or hasattr(TrialValues, name):
            raise InvalidInput("param", text[:200], f"every trial has a {name} of its own, give another name")
        if ".." in values:
            return cls(name, text, _read_range(text, values))
        if values.startswith("log:"):
            raise InvalidInput("param", text[:200], "log: is for a range, such as log:1e-4..1e-1")
        return cls(name, text, _read_choices(text, values))


def _read_range(text: str, values: str) -> NumberRange:
    log = values.startswith("log:")
    ends, colon, step_typed = values.removeprefix("log:").partition(":")
    low_typed, _, high_typed = ends.partition("..")  # the dots may stand behind the colon, where they make no range
    low, high = _number(low_typed), _number(high_typed)
    step = _number(step_typed) if colon else None
    if low is None or high is None or (colon and step is None):
        raise InvalidInput("param", text[:200], f"a range needs two numbers, {_HOW}")
    if not low < high:
        raise InvalidInput("param", text[:200], f"this range is empty, give a lower end below {high:g}")
    if log and low <= 0:
        raise InvalidInput("param", text[:200], "a logarithm needs numbers above 0, give a lower end above 0")
    if log and colon:
        raise InvalidInput("param", text[:200], "a step is for ranges without log:, leave one out")
    if step is not None and not 0 < step <= high - low:
        raise InvalidInput("param", text[:200], f"give a step above 0 and at most {high - low:g}")
    if step is not None and not math.isclose(count := (high - low) / step, round(count), abs_tol=1e-9):
        raise InvalidInput("param", text[:200], f"steps of {step:g} from {low:g} do not meet {high:g}")
    if isinstance(step, float):
        low, high = float(low), float(high)
    return NumberRange(low, high, log, step)


def _read_choices(text: str, values: str) -> Choices:
    words = [word.strip() for word in values.split(",")]
    if not all(words) or len(words) < 2:
        raise InvalidInput("param", text[:200], f"give two values or more, or a range, {_HOW}")
    numbers = [_number(word) for word in words]
    found: list[Value] = [word if number is None else number for word, number in zip(words, numbers, strict=True)]
    if None in numbers:
        found = list(words)
    if len(set(found)) < len(found):
        raise InvalidInput("param", text[:200], "a value is there twice, give each once")
    return Choices(tuple(found))


def _number(text: str) -> int | float | None:
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(text)):
            return number
    return None


class SearchSpace:
    """All parameters that are searched for."""

    def __init__(self, parameters: Sequence[SearchedParameter]) -> None:
        self.parameters = tuple(parameters)

    @classmethod
    def parse(cls, texts: Sequence[str]) -> SearchSpace:
        found: dict[str, SearchedParameter] = {}
        for text in texts:
            parameter = SearchedParameter.parse(text)
            if parameter.name in found:
                raise InvalidInput("param", text[:200], f"{parameter.name} is there twice, give it once")
            found[parameter.name] = parameter
        return cls(list(found.values()))

    @property
    def names(self) -> list[str]:
        return [parameter.name for parameter in self.parameters]

    def distributions(self) -> dict[str, BaseDistribution]:
        return {parameter.name: parameter.values.distribution() for parameter in self.parameters}

    def grid_size(self) -> int:
        """How many points a grid has; a sentence for a parameter that is not of so few values."""
        return math.prod(len(values) for values in self._grids())

    def grid_point(self, number: int) -> dict[str, Value]:
        """Point number n of the grid; the last parameter changes first.

        >>> space = SearchSpace.parse(["width=64,128", "layers=1..3"])
        >>> space.grid_size(), space.grid_point(4)
        (6, {'width': 128, 'layers': 2})
        """
        point: dict[str, Value] = {}
        for parameter, values in reversed(list(zip(self.parameters, self._grids(), strict=True))):
            number, index = divmod(number, len(values))
            point[parameter.name] = values[index]
        return {name: point[name] for name in self.names}

    def _grids(self) -> list[list[Value]]:
        grids = []
        for parameter in self.parameters:
            if (values := parameter.values.grid()) is None:
                expected = "a grid needs values or steps, such as 0.1,0.01 or 0..0.5:0.1"
                raise InvalidInput("param", parameter.typed, expected)
            grids.append(values)
        return grids
