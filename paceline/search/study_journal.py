"""The search as an Optuna study, in a journal file that `optuna-dashboard` opens, and what Optuna's pruners say.

What counts is in the folder's own records (`tune_folder.py`). The journal is made of them anew at every start, so that
a kill in the middle of a line, or with the journal's lock in hand, leaves nothing behind; from then on this process is
the one that writes it.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from paceline.search.goal import Goal
from paceline.search.proposals import quiet_optuna
from paceline.search.space import SearchSpace
from paceline.search.tune_folder import JOURNAL, TrialRecord
from paceline.trial_values import Value

if TYPE_CHECKING:
    from optuna.pruners import BasePruner

PrunerName = Literal["asha", "median"]
PRUNERS: tuple[PrunerName, ...] = get_args(PrunerName)
KEEP_ONE_IN = 3  # of the trials that have come as far, by successive halving


class StudyJournal:
    """Trials as Optuna sees them. It is loaded when the first of them tells something: that takes half a second, and
    the trial runs meanwhile."""

    def __init__(
        self,
        folder: Path,
        space: SearchSpace,
        goal: Goal,
        prune: PrunerName | None,
        begun: Iterable[tuple[int, dict[str, Value], TrialRecord | None]],
    ) -> None:
        """`begun`: trials of earlier starts in order of their number, which is Optuna's too, and what came of them."""
        self._open = partial(_OpenJournal, folder, space, goal, prune)
        self._before = list(begun)  # what there is to write down, as long as it is not open
        self._opened: _OpenJournal | None = None
        for stale in folder.glob(f"{JOURNAL}*"):
            stale.unlink(missing_ok=True)

    @property
    def _journal(self) -> _OpenJournal:
        if self._opened is None:
            self._opened = self._open(self._before)
        return self._opened

    def begin(self, number: int, values: dict[str, Value]) -> None:
        """Trial `number` runs, with these values."""
        if self._opened is None:
            self._before.append((number, values, None))
        else:
            self._opened.begin(number, values)

    def report(self, number: int, place: int, value: float) -> bool:
        """The trial has told its metric, for the `place`-th time; whether it should end."""
        return self._journal.report(number, place, value)

    def rungs(self, number: int) -> dict[str, float]:
        """What the pruner has noted about the trial."""
        return self._journal.rungs(number)

    def end(self, record: TrialRecord) -> None:
        """The trial has ended."""
        self._journal.end(record)


class _OpenJournal:
    """The journal's file, and Optuna."""

    def __init__(
        self,
        folder: Path,
        space: SearchSpace,
        goal: Goal,
        prune: PrunerName | None,
        begun: Iterable[tuple[int, dict[str, Value], TrialRecord | None]],
    ) -> None:
        from optuna import create_study
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        path = folder / JOURNAL
        self._distributions = space.distributions()
        self._pruner = _pruner(prune)
        with quiet_optuna():
            self._storage = JournalStorage(JournalFileBackend(str(path)))
            self._study = create_study(
                storage=self._storage,
                study_name=folder.name,
                direction=goal.direction,
                pruner=self._pruner,
            )
            self._study_id = self._storage.get_study_id_from_name(folder.name)
            self._ids: dict[int, int] = {}
            for number, values, record in begun:
                if record is None:
                    self.begin(number, values)
                else:
                    template = record.as_optuna(self._distributions)
                    self._ids[number] = self._storage.create_new_trial(self._study_id, template)

    def begin(self, number: int, values: dict[str, Value]) -> None:
        from optuna.trial import TrialState, create_trial

        trial = create_trial(state=TrialState.RUNNING, params=dict(values), distributions=self._distributions)
        trial.datetime_start = datetime.datetime.now()
        self._ids[number] = self._storage.create_new_trial(self._study_id, trial)

    def report(self, number: int, place: int, value: float) -> bool:
        self._storage.set_trial_intermediate_value(self._ids[number], place, value)
        with quiet_optuna():
            return self._pruner.prune(self._study, self._storage.get_trial(self._ids[number]))

    def rungs(self, number: int) -> dict[str, float]:
        noted = self._storage.get_trial(self._ids[number]).system_attrs
        return {name: value for name, value in noted.items() if isinstance(value, float)}

    def end(self, record: TrialRecord) -> None:
        ended = record.as_optuna(self._distributions)
        values = [record.metric] if record.end == "done" and record.metric is not None else None
        self._storage.set_trial_state_values(self._ids[record.number], ended.state, values)


def _pruner(name: PrunerName | None) -> BasePruner:
    from optuna.pruners import MedianPruner, NopPruner, SuccessiveHalvingPruner

    if name == "asha":
        return SuccessiveHalvingPruner(min_resource=1, reduction_factor=KEEP_ONE_IN)
    return MedianPruner() if name == "median" else NopPruner()
