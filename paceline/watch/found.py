"""What a run has found so far: each finding once, from whoever is in charge.

Every replica tells what it finds (`findings.py`). Of an evaluation, which is the same in all, the first is heard: with
async servers the one in charge may come to it much later. Of logged numbers the one in charge is heard. What the others
tell under the same key waits until that one has told it, or has died without: then whoever is in charge next is heard,
from the first finding on that nobody has told. A process that is started again tells old keys once more, and nobody
listens.

So a finding is never lost with a process, and never counted twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.findings import Finding, Message, ModelSaved, ServersAccount, TrainingBegan, TrialAsked
from paceline.watch.target import Target

MOST_WAITING = 10_000  # findings of one replica that is not in charge


@dataclass(frozen=True)
class FoundValue:
    """A number that was told: how far the run was then."""

    value: float
    step: int
    samples: int
    seconds: float | None  # of training, since the first step of this run began


@dataclass(frozen=True)
class TargetSeen:
    """How near a run came to its target."""

    target: str
    reached: FoundValue | None = None
    last: FoundValue | None = None
    best: float | None = None  # of all values


class FoundSoFar:
    """What one run has found."""

    def __init__(self, write: Callable[..., None], target: Target | None = None) -> None:
        """`write` takes an event."""
        self._write = write
        self._target = target
        self._told: set[str] = set()
        self._asked: set[str] = set()  # parameters of a trial
        self._waiting: dict[int, dict[str, Finding]] = {}  # by row and key, in the order in which they were told
        self.began_at: float | None = None
        self.cutting_s: float | None = None  # of whoever took longest
        self.latest: dict[str, FoundValue] = {}
        self.account: ServersAccount | None = None
        self.saved: str | None = None  # the last checkpoint of the script's
        self.target_seen = TargetSeen(str(target)) if target is not None else None

    def take(self, row: int, message: Message, in_charge: int | None) -> None:
        """What the process in that row tells. `in_charge`: the row that is heard; None: on another host."""
        if isinstance(message, TrainingBegan):
            self.began_at = message.at if self.began_at is None else min(message.at, self.began_at)
            if message.cutting_s is not None:
                self.cutting_s = max(message.cutting_s, self.cutting_s or 0.0)
        elif isinstance(message, ModelSaved):
            self.saved = message.path
        elif in_charge is None:
            return
        elif isinstance(message, TrialAsked):
            if message.name not in self._asked:
                self._asked.add(message.name)
                self._write("asked", name=message.name)
        elif isinstance(message, ServersAccount):
            self.account = message
        elif row == in_charge or message.word_of == "any":
            self._tell(message)
        elif message.word_of == "in charge" and message.key not in self._told:
            waiting = self._waiting.setdefault(row, {})
            waiting[message.key] = message
            if len(waiting) > MOST_WAITING:
                del waiting[next(iter(waiting))]

    def hear(self, row: int) -> None:
        """From now on this row is in charge."""
        for finding in self._waiting.pop(row, {}).values():
            self._tell(finding)

    def _tell(self, finding: Finding) -> None:
        if finding.key in self._told:
            return
        self._told.add(finding.key)
        for waiting in self._waiting.values():
            waiting.pop(finding.key, None)
        seconds = round(finding.at - self.began_at, 4) if self.began_at is not None else None
        for name, value in finding.values.items():
            found = self.latest[name] = FoundValue(value, finding.step, finding.samples, seconds)
            fields = {"step": finding.step, "samples": finding.samples, "seconds": seconds, "name": name}
            self._write("found", time=round(finding.time, 3), **fields, value=value)
            self._look_at_target(name, found)

    def _look_at_target(self, name: str, found: FoundValue) -> None:
        seen, target = self.target_seen, self._target
        if seen is None or target is None or not target.is_for(name) or math.isnan(found.value):
            return
        reached = found if seen.reached is None and target.holds(found.value) else seen.reached
        self.target_seen = TargetSeen(seen.target, reached, found, target.better(seen.best, found.value))
