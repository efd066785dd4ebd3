"""What is said about a run and written down: sentences and the shown replica's output to the display, events to the
run folder. A process is named in one way everywhere: "replica 1", or "device 1 of replica 0" if the model is cut.
"""

from __future__ import annotations

import signal

from paceline.exchange.board import called
from paceline.launch.job import RunJob
from paceline.launch.limits import behind_end
from paceline.watch.display import Display
from paceline.watch.run_folder import RunFolder


class Reporter:
    """Speaks for the supervisor of one host. `shown` is the row whose output the user sees; None: nobody's."""

    def __init__(self, job: RunJob, folder: RunFolder, display: Display) -> None:
        self._job = job
        self.folder = folder
        self.display = display
        self.shown: int | None = 0 if job.shown else None

    def say(self, line: str) -> None:
        self.display.say(f"paceline: {line}")

    def event(self, event: str, **fields: object) -> None:
        self.folder.events.write(event, **fields)

    def called(self, row: int) -> str:
        """How a sentence names the process in this row."""
        return called(self._job.place.rank + row, self._job.place.strategy.devices)

    def pass_on(self, row: int, data: bytes, *, error: bool) -> None:
        """What a replica has printed, which the user sees if it is the one that is shown."""
        if row == self.shown:
            self.display.pass_on(data, error=error)

    def show_another(self, row: int) -> None:
        """From now on the user sees what this one prints, beginning with a line of its own."""
        self.shown = row
        self.display.end_line()

    def failure(self, row: int, code: int, step: int, last_errors: str, step_of: dict[int, int]) -> tuple[int, str]:
        """Tell of a script that has failed: of the first failure, which is the cause. Returns the run's exit code, and
        what other hosts are told."""
        first = self.folder.first_failure()
        sentence = f"{self.called(row)} ended with code {code} {at(step)}"
        if first is not None:
            sentence = f"{called(first.replica, self._job.place.strategy.devices)} failed: {first.sentence}"
        if first is None:
            report = last_errors if row != self.shown else ""
            self.say(f"{sentence}{behind_end(code, last_errors)}{below(report)}")
        elif (failed := first.replica - self._job.place.rank) in step_of:
            self.say(f"{self.called(failed)} failed {at(step_of[failed])}{below(first.text)}")
        # Otherwise another host's replica has failed before, and its own supervisor says so.
        self.shown = None
        rank = self._job.place.rank + row
        self.event("failed", replica=rank, code=code, step=step, kind=first.kind if first else None)
        return 1 if first is not None else code, sentence

    def strangers(self, count: int) -> None:
        """Tell of processes that never came to the board, and so were no replicas of one another."""
        self.say(
            f"the script never used Paceline: it ran {count} times, each process for itself, or joined by its own "
            "means; pl.Trainer or pl.distribute makes them replicas of one training"
        )


def signal_name(number: int) -> str:
    """
    >>> signal_name(9), signal_name(40)  # real-time signals have no names
    ('SIGKILL', 'signal 40')
    """
    return signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"


def at(step: int) -> str:
    return f"at step {step}" if step else "before its first step"


def below(report: str) -> str:
    return f":\n{report.rstrip()}" if report.strip() else ""
