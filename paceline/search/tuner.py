"""Who is started when: trials in order of their number, as many at a time as there are slots, each on its own cores.

    slot 0   │ trial 0 ────── │ trial 2 ─ │ trial 4 ──── …
    slot 1   │ trial 1 ── │ trial 3 ─────────── │ trial 5 …

With folds a trial is as many runs, which are given to slots one by one. One thread, one selector: the ends of runs are
descriptors, and ten times a second there is a look at what they tell. A trial's result is a file before anything else
is made of it, so a search that is killed has lost nothing that it has ever shown.
"""

from __future__ import annotations

import math
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from paceline.checkpoint_note import CheckpointNote
from paceline.errors import LaunchError
from paceline.launch.cores import allowed_cores, share_of_cores
from paceline.launch.run_template import RunTemplate
from paceline.search.goal import Goal
from paceline.search.leaderboard import RunningTrial, ranked
from paceline.search.proposals import Proposals, SamplerName
from paceline.search.script_arguments import ScriptArguments
from paceline.search.space import SearchSpace
from paceline.search.study_journal import PrunerName, StudyJournal
from paceline.search.top import checkpoint_in
from paceline.search.trial_run import TrialRun, has_crashed, was_killed
from paceline.search.tune_folder import TrialEnd, TrialRecord, TuneFolder
from paceline.trial_values import FOLD, TrialPlace, Value

LOOK_EVERY_S = 0.1
CLOCK_EVERY_S = 1.0
MOST_REPORTS = 1000  # of one trial, to the journal
REFUSED_ARGUMENTS = 2  # exit code of argparse
CRASHES_AGAIN = 1  # how often a run is started again that has brought itself down


@dataclass(frozen=True)
class Search:
    """What is searched for, and how."""

    script: str
    arguments: ScriptArguments
    command: Callable[[TrialPlace], list[str]]  # of `paceline`, without its run folder
    space: SearchSpace
    goal: Goal
    sampler: SamplerName
    seed: int
    trials: int
    parallel: int
    budget_s: float = math.inf
    folds: int | None = None
    prune: PrunerName | None = None
    max_restarts: int = 10  # of a run that was killed
    loads: Sequence[str] = ()  # modules that all trials need, torch's among them


class Watcher(Protocol):
    """Who shows a search."""

    def ended(self, record: TrialRecord) -> None:
        """Tells of a trial that has ended."""

    def say(self, line: str) -> None:
        """Tells of anything else."""

    def show(self, tuner: Tuner) -> None:
        """Is called again and again."""


@dataclass(eq=False)
class TrialInHand:
    """A trial that has not ended."""

    number: int
    values: dict[str, Value]
    runs: list[TrialRun]
    began: float = field(default_factory=time.time)
    done: int = 0  # of its runs
    reported: int = 0  # to the journal


class Tuner:
    """Makes the trials of one search."""

    def __init__(self, search: Search, folder: TuneFolder, watcher: Watcher) -> None:
        self._search, self._folder, self._watcher = search, folder, watcher
        self.records: dict[int, TrialRecord] = {}
        self.stopped_by: str | None = None
        self._proposals = Proposals(search.space, search.goal, search.sampler, search.seed, search.parallel)
        self._in_hand: dict[int, TrialInHand] = {}
        self._waiting: deque[tuple[TrialInHand, TrialRun]] = deque()
        self._slots: dict[TrialRun, int] = {}  # of those that run
        self._owner: dict[TrialRun, TrialInHand] = {}
        self._template = RunTemplate(search.loads)
        self._selector = selectors.DefaultSelector()
        self._began_at, self._seconds_before = time.monotonic(), folder.seconds
        self._clock_written_at = 0.0

    # ── what is known ────────────────────────────────────────────────────────────────────────────────────

    @property
    def seconds(self) -> float:
        """How long the search has taken, in all its starts."""
        return self._seconds_before + time.monotonic() - self._began_at

    @property
    def ranked(self) -> list[TrialRecord]:
        return ranked(self.records.values(), self._search.goal)

    @property
    def running(self) -> list[RunningTrial]:
        """The trials that have been begun and have not ended."""
        found = []
        for trial in self._in_hand.values():
            told = [value for run in trial.runs for value in list(self._metric(run).values())[-1:]]
            folds = f"fold {trial.done + 1} of {len(trial.runs)}" if len(trial.runs) > 1 else ""
            metric = sum(told) / len(told) if told else None
            found.append(RunningTrial(trial.number, trial.values, sum(r.steps for r in trial.runs), metric, folds))
        return found

    def _metric(self, run: TrialRun) -> dict[int, float]:
        return dict(sorted(self._search.goal.of(run.told).items()))

    # ── the search ───────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Make all trials, those that an earlier start has left first."""
        try:
            self._take_up()
            while True:
                self._fill()
                if not self._slots:
                    return
                for key, _ in self._selector.select(LOOK_EVERY_S):
                    self._on_end(cast(TrialRun, key.fileobj))
                self._look()
        finally:
            for run in list(self._slots):
                run.end()
            self._template.close()
            self._selector.close()
            self._folder.seconds = self.seconds

    def _take_up(self) -> None:
        """What an earlier start of this search has left."""
        begun = []
        for number in self._folder.begun():
            values, record = self._folder.values_of(number), self._folder.record_of(number)
            assert values is not None
            begun.append((number, values, record))
            if record is not None:
                self.records[number] = record
        search = self._search
        self._journal = StudyJournal(self._folder.path, search.space, search.goal, search.prune, begun)
        for number, values, record in begun:
            if record is None and number < search.trials:
                self._take_in_hand(number, values)
        self._next = max((number for number, _, _ in begun), default=-1) + 1

    def _take_in_hand(self, number: int, values: dict[str, Value]) -> None:
        runs = [TrialRun(self._place(number, values, fold)) for fold in range(self._search.folds or 1)]
        trial = self._in_hand[number] = TrialInHand(number, values, runs)
        for run in runs:
            self._owner[run] = trial
            if run.is_over:
                self._run_done(trial, run)
            elif number in self._in_hand:
                self._waiting.append((trial, run))

    def _place(self, number: int, values: dict[str, Value], fold: int) -> TrialPlace:
        folder, folds = self._folder.trial_folder(number).resolve(), self._search.folds
        return TrialPlace(
            number=number,
            parameters=values,
            folder=str(folder if folds is None else folder / f"fold-{fold}"),
            metric=self._search.goal.metric,
            seed=self._search.seed,
            fold=None if folds is None else fold,
            folds=folds,
        )

    def _fill(self) -> None:
        while len(self._slots) < self._search.parallel and self.stopped_by is None:
            if not self._waiting and not self._begin_next():
                return
            _, run = self._waiting.popleft()
            slot = min(set(range(self._search.parallel)) - set(self._slots.values()))
            cores = share_of_cores(slot, self._search.parallel, allowed_cores())
            self._slots[run] = slot
            run.start(self._search.command(run.place), cores, self._template)
            self._selector.register(run, selectors.EVENT_READ)

    def _begin_next(self) -> bool:
        """Begin a new trial, if there is one and what it needs is known."""
        number = self._next
        needs = self._proposals.needs(number)
        if number >= self._search.trials or any(before not in self.records for before in needs):
            return False
        ended = [self.records[before] for before in needs]
        others = [self._values_of(before) for before in range(len(needs), number)]
        values = self._proposals.values(number, ended, others)
        self._folder.begin(number, values)
        self._journal.begin(number, values)
        self._next += 1
        self._take_in_hand(number, values)
        return True

    def _values_of(self, number: int) -> dict[str, Value]:
        record = self.records.get(number)
        return record.values if record is not None else self._in_hand[number].values

    def _look(self) -> None:
        for run in list(self._slots):
            run.look()
            self._report(self._owner[run], run)
        if self.seconds >= self._search.budget_s and self.stopped_by is None:
            self.stopped_by = "budget"
            for run in self._slots:
                run.stop()
        if time.monotonic() >= self._clock_written_at + CLOCK_EVERY_S:
            self._clock_written_at = time.monotonic()
            self._folder.seconds = self.seconds
        self._watcher.show(self)

    def _report(self, trial: TrialInHand, run: TrialRun) -> None:
        """Tell Optuna what the trial has told, and end it if that says so."""
        if len(trial.runs) > 1:
            return
        values = list(self._metric(run).values())
        for place in range(trial.reported + 1, min(len(values), MOST_REPORTS) + 1):
            trial.reported = place
            if self._journal.report(trial.number, place, values[place - 1]):
                run.stop()
                return

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────────

    def _on_end(self, run: TrialRun) -> None:
        trial = self._owner[run]
        self._selector.unregister(run)
        del self._slots[run]
        code = run.ended()
        if code == 0 or run.is_over:
            self._run_done(trial, run)
        elif self.stopped_by is not None or trial.number not in self._in_hand:
            return  # it goes on another time, or its trial has failed
        elif run.asked_to_stop and was_killed(code):
            self._report(trial, run)
            self._end(trial, "pruned")
        elif was_killed(code) and run.kills <= (CRASHES_AGAIN if has_crashed(code) else self._search.max_restarts):
            self._watcher.say(f"trial {trial.number} was killed and is started again")
            self._waiting.appendleft((trial, run))
        else:
            self._check_arguments(run, code)
            self._end(trial, "failed", run.last_words or f"exit code {code}")

    def _run_done(self, trial: TrialInHand, run: TrialRun) -> None:
        if trial.number not in self._in_hand:
            return
        if not any(record.end == "done" for record in self.records.values()):
            self._check_first(run)
        trial.done += 1
        self._report(trial, run)
        metric = list(self._metric(run).values())
        if not metric or not math.isfinite(metric[-1]):
            what = f"{self._search.goal.metric} was {'not a number in the end' if metric else 'never told'}"
            self._end(trial, "failed", what)
        elif trial.done == len(trial.runs):
            self._end(trial, "done")

    def _note(self, run: TrialRun) -> CheckpointNote:
        """How the model that this run has saved is made, and how good it was in the end."""
        values = list(self._metric(run).values())
        metrics = {self._search.goal.metric: values[-1]} if values and math.isfinite(values[-1]) else {}
        return CheckpointNote(list(self._search.arguments.of(run.place)), metrics, run.place)

    def _end(self, trial: TrialInHand, end: TrialEnd, error: str | None = None) -> None:
        """Write down what came of a trial, then tell everybody."""
        del self._in_hand[trial.number]
        self._waiting = deque((one, run) for one, run in self._waiting if one is not trial)
        for run in trial.runs:
            if run in self._slots:
                run.stop()
        told = [self._metric(run) for run in trial.runs]
        folds = [list(values.values())[-1] for values in told if values] if len(trial.runs) > 1 else []
        last = folds or list(told[0].values())[-1:]
        saved = [(path, self._note(run)) for run in trial.runs if (path := checkpoint_in(run.folder)) is not None]
        record = TrialRecord(
            number=trial.number,
            values=trial.values,
            end=end,
            metric=_finite(sum(last) / len(last)) if last and end != "failed" else None,
            folds=folds if end == "done" else [],
            told=[(step, _finite(value)) for step, value in told[0].items()] if not folds else [],
            steps=sum(run.steps for run in trial.runs),
            seconds=round(sum(run.seconds for run in trial.runs), 3),
            at_s=round(self.seconds, 3),
            began=trial.began,
            ended=time.time(),
            starts=sum(run.starts for run in trial.runs),
            checkpoints=[str(path.relative_to(self._folder.path.resolve())) for path, _ in saved],
            notes=[note for _, note in saved],
            error=error,
            rungs=self._journal.rungs(trial.number),
        )
        self._folder.keep(record)
        self.records[record.number] = record
        self._journal.end(record)
        self._watcher.ended(record)

    # ── what the first trial shows ───────────────────────────────────────────────────────────────────────

    def _check_first(self, run: TrialRun) -> None:
        """Whether the script tells the metric and takes its parameters: with the first run that goes to its end."""
        search = self._search
        search.goal.check_told(run.told)
        missing = [name for name in search.arguments.to_ask_for if name not in run.asked]
        for name in missing:
            if name == FOLD:
                raise LaunchError(
                    f"folds is {search.folds}: {search.script} never called pl.trial().fold(dataset), which gives it "
                    "its part; that, or {fold} among its arguments, makes them differ"
                )
            raise LaunchError(
                f"param {name} was never asked for: {search.script} has no flag --{name.replace('_', '-')} and did not "
                f"use pl.trial().{name}; do one of these, or say where it goes, as in -- --rate {{{name}}}"
            )

    def _check_arguments(self, run: TrialRun, code: int) -> None:
        if code == REFUSED_ARGUMENTS and not run.steps and not self.records:
            said = [line for line in run.last_words.splitlines() if not line.startswith("paceline: ")]
            raise LaunchError(f"{self._search.script} does not take its arguments: {said[-1] if said else code}")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
