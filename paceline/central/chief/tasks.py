"""Tasks: what happens between steps, once for all replicas. An evaluation is divided among whoever turns up, a save is
done by the first that does. Nobody waits for others to turn up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from paceline.central.chief.tickets import Wait
from paceline.data.book import Runs, cut
from paceline.errors import DataError


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
    """Those that are being done, and what came of the others."""

    def __init__(self) -> None:
        self.results: dict[str, list[float]] = {}
        self._tasks: dict[str, _Task] = {}

    def ask(self, replica: int, name: str, length: int, among: int) -> tuple[int, Runs] | Wait | list[float]:
        """A part of a task to do, of as many as there are replicas to do it; or the task's result, if it is done; or
        wait for those who are at it."""
        if name in self.results:
            return self.results[name]
        task = self._tasks.get(name)
        if task is None:
            # With nothing to divide there is one empty part: somebody still has to say what comes of it.
            parts: list[Runs] = cut([range(length)], min(length, among)) if length else [(range(0),)]
            task = self._tasks[name] = _Task(length, parts, deque(range(len(parts))))
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

    def finish(self, replica: int, name: str, part: int, values: list[float]) -> None:
        task = self._tasks.get(name)
        if task is None or task.out.get(part) != replica:
            return
        del task.out[part]
        task.done[part] = values
        if len(task.done) == len(task.parts):
            self.results[name] = task.total()
            del self._tasks[name]

    def leave(self, replica: int) -> None:
        """Somebody else has to do what this replica was doing."""
        for task in self._tasks.values():
            for part in [part for part, holder in task.out.items() if holder == replica]:
                del task.out[part]
                task.waiting.appendleft(part)
