"""Tasks: what happens between steps, once for all replicas. An evaluation is divided among whoever turns up, a save is
done by the first that does. Nobody waits for others to turn up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from paceline.central.chief.tickets import Wait
from paceline.data.book import Runs, cut
from paceline.errors import DataError
from paceline.evaluations import EvaluationKey


class _Key(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    words: ClassVar[str]
    over_after_a_step: ClassVar[bool] = False  # whether nobody has to do it once a step has been made
    holds_for_later_runs: ClassVar[bool] = False  # whether a later run in the same container has the same result


class FillTask(_Key, frozen=True):
    """The first replica gives a new container its values."""

    words = "the initial values"
    over_after_a_step = True
    holds_for_later_runs = True


class ResumeTask(_Key, frozen=True):
    """The first replica gives the container a checkpoint's values: the run's `number`-th resume."""

    number: int
    words = "a resume"
    over_after_a_step = True


class OnceTask(_Key, frozen=True):
    """One replica acts for all, as in a save: the run's `number`-th act."""

    number: int
    words = "a save"


class EvaluationTask(_Key, frozen=True):
    """All replicas evaluate; the result is the sums over all samples."""

    key: EvaluationKey
    words = "an evaluation"
    holds_for_later_runs = True


TaskKey = FillTask | ResumeTask | OnceTask | EvaluationTask


@dataclass
class _Task:
    length: int
    parts: list[Runs]
    waiting: deque[int]
    out: dict[int, int] = field(default_factory=dict)  # part -> replica
    done: dict[int, list[float]] = field(default_factory=dict)

    def total(self) -> list[float]:
        sums = [0.0] * max(map(len, self.done.values()), default=0)
        for part in sorted(self.done):
            for index, value in enumerate(self.done[part]):
                sums[index] += value
        return sums


class Tasks:
    """Knows the tasks that are being done, and what came of the others."""

    def __init__(self) -> None:
        self.results: dict[TaskKey, list[float]] = {}
        self._tasks: dict[TaskKey, _Task] = {}

    def ask(self, replica: int, key: TaskKey, length: int, among: int) -> tuple[int, Runs] | Wait | list[float]:
        """A part of a task to do, of as many as there are replicas to do it; or the task's result, if it is done; or
        wait for those who are at it."""
        if key in self.results:
            return self.results[key]
        task = self._tasks.get(key)
        if task is None:
            # With nothing to divide there is one empty part: somebody still has to say what comes of it.
            parts: list[Runs] = cut([range(length)], min(length, among)) if length else [(range(0),)]
            task = self._tasks[key] = _Task(length, parts, deque(range(len(parts))))
        if task.length != length:
            raise DataError("dataset length", length, f"another replica has {task.length} samples; give all the same")
        for part, holder in task.out.items():
            if holder == replica:
                return part, task.parts[part]  # its answer was lost on the way
        if task.waiting:
            part = task.waiting.popleft()
            task.out[part] = replica
            return part, task.parts[part]
        return Wait("replicas " + ", ".join(map(str, sorted(set(task.out.values())))))

    def finish(self, replica: int, key: TaskKey, part: int, values: list[float]) -> None:
        task = self._tasks.get(key)
        if task is None or task.out.get(part) != replica:
            return
        del task.out[part]
        task.done[part] = values
        if len(task.done) == len(task.parts):
            self.results[key] = task.total()
            del self._tasks[key]

    def leave(self, replica: int, key: TaskKey | None = None) -> None:
        """Have somebody else do what this replica was doing, of that task or of all."""
        for task in [task for of, task in self._tasks.items() if key in (None, of)]:
            for part in [part for part, holder in task.out.items() if holder == replica]:
                del task.out[part]
                task.waiting.appendleft(part)
