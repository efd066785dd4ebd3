"""What happened in a run: one JSON object a line, and a look-out for what nobody reports, a stall.

    {"time": 1763232000.123, "event": "died", "replica": 1, "signal": "SIGKILL", "step": 12}

A run is worth more than its diary: a full disk is said once, and training goes on.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.exchange.board import Board
from paceline.exchange.words import Phase, Word

STALL_S = 30.0  # a wait this long is spoken of; again at twice the time, four times …
MOST_FRAMES = 5

_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')


class AppendFile:
    """A file that only grows and never fails its writer: the first error goes to `complain`."""

    def __init__(self, path: Path, complain: Callable[[OSError], None]) -> None:
        self.path = path
        self._complain = complain
        self._descriptor: int | None = None
        try:
            # Append mode: a replica's log has two writers, the supervisor and the replica's own stack dumps.
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            complain(error)

    def write(self, data: bytes) -> None:
        if self._descriptor is None:
            return
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            self._complain(error)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class EventLog:
    """The events of a run, in `events.jsonl`."""

    def __init__(self, file: AppendFile) -> None:
        self._file = file

    def write(self, event: str, **fields: object) -> None:
        record = {"time": round(time.time(), 3), "event": event, **fields}
        self._file.write(msgspec.json.encode(record) + b"\n")  # a loss that is not a number becomes null

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Stall:
    """Replicas wait, and this is for whom: those that do something else, the longest at it first."""

    waited_s: float
    waiting: tuple[int, ...]
    busy: tuple[int, ...]


class StallWatch:
    """Notices replicas that have been waiting for long; each stall is told again when it has doubled."""

    def __init__(self, after_s: float = STALL_S) -> None:
        self._after_s = after_s
        self._next_s = after_s

    def look(self, board: Board, living: Iterable[int]) -> Stall | None:
        now = time.monotonic_ns()
        waits: dict[int, float] = {}
        busy: dict[int, float] = {}
        for row in living:
            since_s = (now - board.get(row, Word.SINCE_NS)) / 1e9
            (waits if Phase(board.get(row, Word.PHASE)).is_wait else busy)[row] = since_s
        waited_s = max(waits.values(), default=0.0)
        if waited_s < self._after_s:
            self._next_s = self._after_s
        if waited_s < self._next_s:
            return None
        self._next_s = 2 * waited_s
        return Stall(waited_s, tuple(waits), tuple(sorted(busy, key=lambda row: -busy[row])))


def innermost_frames(dump: str) -> list[str]:
    """Where the main thread stands, from a stack dump of faulthandler (most recent call first).

    >>> innermost_frames('''Current thread 0x00007f (most recent call first):
    ...   File "train.py", line 7 in load
    ...   File "train.py", line 9 in <module>
    ... ''')
    ['train.py:7 in load', 'train.py:9 in <module>']
    """
    _, _, current = dump.rpartition("Current thread ")
    frames = [match for line in current.splitlines() if (match := _FRAME.fullmatch(line))]
    return [f"{frame['file']}:{frame['line']} in {frame['function']}" for frame in frames[:MOST_FRAMES]]
