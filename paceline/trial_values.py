"""`pl.trial()`: what a script is to try, inside of it.

    trial = pl.trial(lr=1e-3, width=256)  # its defaults
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.lr)

`paceline tune` gives every run that it starts one JSON value in `PACELINE_TRIAL`. Without one, as in plain `python`, a
trial has the defaults. What a script asks for is told to the supervisor, so that the tuner learns of a parameter that
nobody takes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import InvalidInput, nearest_first
from paceline.findings import MessageWriter, TrialAsked
from paceline.run_place import find_place

TRIAL_VARIABLE = "PACELINE_TRIAL"
FOLD = "fold()"  # under which it is told that a script has asked for its part of the data; no parameter is called so
DEFAULT_FOLDS = 5

Value = int | float | str


class TrialPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Which trial a run is."""

    number: int
    parameters: dict[str, Value]
    folder: str
    metric: str
    seed: int = 0  # of the folds
    fold: int | None = None
    folds: int | None = None


class TrialValues(Mapping[str, Any]):
    """The parameters of this trial by name, as `trial.lr` or `trial["lr"]`, over the script's defaults.

    >>> values = TrialValues(None, {"lr": 0.1, "width": 64})
    >>> values.lr, values["width"], values.get("dropout", 0.5), dict(values), values.number
    (0.1, 64, 0.5, {'lr': 0.1, 'width': 64}, None)
    """

    def __init__(
        self, place: TrialPlace | None, defaults: Mapping[str, Any], told: MessageWriter | None = None
    ) -> None:
        self._place, self._told = place, told
        self._values = {**defaults, **(place.parameters if place is not None else {})}
        self._asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._ask(name)
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._ask(name)
        if name not in self._values:
            near = ", ".join(nearest_first(name, list(self._values))) or "none"
            hint = f"this trial has {near}; pl.trial({name}=…) gives it a default"
            raise AttributeError(f"trial.{name} was not given: {hint}")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        which = f"trial {self._place.number}" if self._place is not None else "no trial"
        return f"<{which}: {', '.join(f'{name} {value}' for name, value in self._values.items())}>"

    @property
    def number(self) -> int | None:
        """Which trial this is, from 0; None outside of `paceline tune`."""
        return self._place.number if self._place is not None else None

    @property
    def folder(self) -> Path:
        """Where this trial's files belong, its checkpoint above all; the current folder outside of `paceline tune`."""
        return Path(self._place.folder) if self._place is not None else Path()

    def fold(self, dataset: Any, *, folds: int = DEFAULT_FOLDS) -> tuple[Any, Any]:
        """The dataset in two parts, to train on and to validate with: each sample is in exactly one validation part of
        all folds. `paceline tune --folds N` says how many there are and which one this run is; otherwise it is the
        first of `folds`."""
        from paceline.data.folds import split_by_fold

        self._ask(FOLD)
        place = self._place
        if place is None or place.fold is None or place.folds is None:
            return split_by_fold(dataset, 0, folds, place.seed if place is not None else 0)
        return split_by_fold(dataset, place.fold, place.folds, place.seed)

    def _ask(self, name: str) -> None:
        if self._told is not None and name not in self._asked:
            self._asked.add(name)
            with contextlib.suppress(OSError):  # a supervisor that is gone takes its replicas with it
                self._told.write(TrialAsked(name))


def find_trial(environment: Mapping[str, str] = os.environ) -> TrialPlace | None:
    """Which trial this process belongs to, if any."""
    given = environment.get(TRIAL_VARIABLE)
    return msgspec.json.decode(given, type=TrialPlace) if given else None


def trial(**defaults: Any) -> TrialValues:
    """What this run is to try: a mapping from names to values, which are attributes too.

    Under `paceline tune` the values are the tuner's; `defaults` hold for what it does not give, and in any other run.
    """
    for name in defaults:
        if hasattr(TrialValues, name):
            raise InvalidInput("parameter of a trial", name, "every trial has something of this name, give another")
    found = find_trial()
    pipe = find_place().findings if found is not None else None
    return TrialValues(found, defaults, MessageWriter(pipe) if pipe is not None else None)
