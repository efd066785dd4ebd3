"""The values of trial number n.

They are the same however long trials take, and however often the search was killed:

- `random` and `grid`: they follow from the seed and n alone.
- `tpe`: from the seed, n, and the results of the trials before it. With several at a time those that run when n begins
  have no result yet, and which ones that are is chance. So trial n is proposed from the results of the trials below
  n − 2 × parallel, and from the values alone of those after them, and waits until these have ended.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, cast, get_args

from paceline.search.goal import Goal
from paceline.search.space import SearchSpace
from paceline.search.tune_folder import TrialRecord
from paceline.seeds import mixed
from paceline.trial_values import Value

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

SamplerName = Literal["tpe", "random", "grid"]
SAMPLERS: tuple[SamplerName, ...] = get_args(SamplerName)
_SEED_BELOW = 2**32  # what numpy takes


class Proposals:
    """Where trials get their values from."""

    def __init__(self, space: SearchSpace, goal: Goal, sampler: SamplerName, seed: int, parallel: int) -> None:
        self._space, self._goal, self._sampler, self._seed = space, goal, sampler, seed
        self._gap = 2 * parallel if sampler == "tpe" and parallel > 1 else 0

    def needs(self, number: int) -> range:
        """The trials that must have ended before this one is proposed."""
        return range(max(0, number - self._gap)) if self._sampler == "tpe" else range(0)

    def values(self, number: int, ended: Sequence[TrialRecord], others: Sequence[dict[str, Value]]) -> dict[str, Value]:
        """The values of trial `number`. `ended`: what it needs; `others`: the values of all others before it."""
        if self._sampler == "grid":
            return self._space.grid_point(number)
        import optuna

        seed = mixed(self._seed, number) % _SEED_BELOW
        sampler: BaseSampler
        with quiet_optuna():
            if self._sampler == "random":
                sampler = optuna.samplers.RandomSampler(seed=seed)
            else:
                sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
            study = optuna.create_study(sampler=sampler, direction=self._goal.direction)
            distributions = self._space.distributions()
            for record in ended if self._sampler == "tpe" else ():
                study.add_trial(record.as_optuna(distributions))
            for values in others if self._sampler == "tpe" else ():
                running = optuna.trial.create_trial(
                    state=optuna.trial.TrialState.RUNNING, params=values, distributions=distributions
                )
                study.add_trial(running)
            return cast("dict[str, Value]", dict(study.ask(distributions).params))


@contextlib.contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna says nothing meanwhile of what it does, and of what it may change one day."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
