"""The regular look at the board, ten times a second: how far the run is, and whether somebody waits for too long."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from paceline.exchange.board import Board
from paceline.launch.job import RunJob
from paceline.launch.replica import ReplicaProcess
from paceline.launch.reporter import Reporter
from paceline.watch.display import Meter, Progress
from paceline.watch.events import StallWatch, innermost_frames
from paceline.watch.found import FoundSoFar

LOOK_EVERY_S = 0.1
EVENT_EVERY_S = 1.0
STACK_S = 0.3  # for a replica to write its stack


class RegularLook:
    """What was seen of the run so far."""

    def __init__(self, job: RunJob, reporter: Reporter) -> None:
        self._job = job
        self.found = FoundSoFar(reporter.event, job.until)
        self._reporter = reporter
        self.meter = Meter()
        self.progress = Progress()
        self._next_event_at = 0.0
        self._stalls = StallWatch(job.stall_s)
        self._stack: tuple[float, ReplicaProcess, int] | None = None

    def at_progress(self, board: Board, rows: Sequence[int]) -> None:
        """`rows` take part, or have done so until their good end."""
        if not rows:
            return
        place = self._job.place
        found = tuple((name, found.value) for name, found in self.found.latest.items())
        self.progress = replace(self.meter.read(board, rows, place.rank, place.strategy.devices), found=found)
        self._reporter.display.show(self.progress)
        now = time.monotonic()
        if self.progress.step and now >= self._next_event_at:
            self._next_event_at = now + EVENT_EVERY_S
            self._reporter.event(
                "step",
                step=self.progress.step,
                total_steps=self.progress.total_steps,
                loss=self.progress.loss,
                samples_per_second=round(self.progress.samples_per_s, 1),
            )

    @property
    def forgot_to_save(self) -> bool:
        """Return whether the script has made steps, and saved nothing of them."""
        return self.progress.step > self.progress.resumed_at and self.found.saved is None

    def for_enough(self) -> str | None:
        """Return by what the run is to stop, if it has done enough: "until" or "longest"."""
        found, target = self.found, self.found.target_seen
        if target is not None and target.reached is not None and not self._job.goes_on:
            return "until"
        if found.began_at is not None and time.monotonic() - found.began_at >= (self._job.longest_s or math.inf):
            return "longest"
        return None

    def for_stalls(self, board: Board, living: Mapping[int, ReplicaProcess]) -> None:
        """Tell of a wait that takes long: who waits, for whom, and where that one stands."""
        now = time.monotonic()
        if self._stack is not None and now >= self._stack[0]:
            _, replica, log_end = self._stack
            self._stack = None
            if frames := innermost_frames(replica.stack_since(log_end)):
                lines = "\n".join(f"  {frame}" for frame in frames)
                self._reporter.say(f"{self._reporter.called(replica.row)} stands at\n{lines}")
        stall = self._stalls.look(board, living)
        if stall is None:
            return
        first = self._job.place.rank
        waiting, busy = ([first + row for row in rows] for rows in (stall.waiting, stall.busy))
        self._reporter.event("stalled", waiting=waiting, waited_for=busy)
        nobody = "the servers" if self._job.server_hosts or self._job.place.servers else "nobody: all of them wait"
        names = ", ".join(map(self._reporter.called, stall.busy)) or nobody
        self._reporter.say(f"a wait has taken {stall.waited_s:.0f} s: {board.who_waits()}; waited for: {names}")
        for row in reversed(stall.busy):  # the stack of the first is shown, all are in the logs
            asked = living[row].ask_for_stack()
            self._stack = None if asked is None else (now + STACK_S, living[row], asked)
