"""What a training process tells of what it found: `trainer.log`, named evaluations, and how its servers fared.

Each finding has a key: the trainer, the place of the script, and how many came before it there. All replicas that make
a finding give it the same key, so that it counts once however many tell it and whoever of them dies. An evaluation is
the same in all of them, so the first that has it is right; numbers that a script logs are the word of the one in
charge, and those that it logs inside its loop while replicas take steps of their own nobody else has.

Without a supervisor (plain `python`, torchrun) nobody listens, and nothing is written.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidInput
from paceline.evaluations import EvaluationKey
from paceline.exchange.board import Board
from paceline.exchange.words import Word
from paceline.findings import (
    MOST_NAME,
    Finding,
    Message,
    MessageWriter,
    ModelSaved,
    ServersAccount,
    TrainingBegan,
    WordOf,
)
from paceline.loop.returned_loss import read_number
from paceline.run_place import Place

ScriptPlace = tuple[int, int, int]  # chapter, epoch, and sample or step


def check_name(field: str, name: object) -> str:
    """Returns the name of a finding, if it is one: it is shown, and asked for by `--until`."""
    if not isinstance(name, str) or not (0 < len(name) <= MOST_NAME and name.isprintable()) or set(name) & set("<>="):
        given = name[:MOST_NAME] if isinstance(name, str) else name
        raise InvalidInput(field, given, f"give up to {MOST_NAME} letters without <, > and =, such as 'accuracy'")
    return name


def check_values(values: Mapping[Any, Any]) -> dict[str, float]:
    """Returns what a script logs as plain numbers."""
    found: dict[str, float] = {}
    for name, value in values.items():
        number, count = read_number(f"logged {check_name('name of what is logged', name)}", value)
        found[name] = number if count is None else number / count if count else float("nan")
    return found


def by_name(name: str, value: Any) -> dict[str, float]:
    """
    >>> by_name("validation", {"accuracy": 0.5, "loss": 1.25})
    {'validation/accuracy': 0.5, 'validation/loss': 1.25}
    >>> by_name("accuracy", 0.5)
    {'accuracy': 0.5}
    """
    if isinstance(value, dict):
        return {f"{name}/{part}": float(number) for part, number in value.items()}
    return {name: float(value)}


class Telling:
    """One trainer's findings, on their way to the supervisor."""

    def __init__(self, place: Place) -> None:
        self._writer: MessageWriter | None = None
        self._began = False
        self._logs: tuple[ScriptPlace, bool] | None = None  # where the last call was, and whether in the loop
        self._count = 0  # calls there
        self._before: tuple[ScriptPlace, int] | None = None  # calls that an earlier run has made, and where
        self._lock = threading.Lock()
        if place.findings is not None and place.board is not None:
            self._writer, self._board = MessageWriter(place.findings), Board(place.board)
            self._trainer = self._board.get(place.row, Word.ARENAS)  # which of the script's

    @property
    def listened_to(self) -> bool:
        return self._writer is not None

    def began(self, at: float, cutting_s: float | None) -> None:
        """A step that began then was made; of the first that is told. Only now: whoever is started again would wake the
        supervisor, which looks for the chief then, before the one that was chief has printed its last line."""
        if not self._began:
            self._began = True
            self._write(TrainingBegan(at, cutting_s))

    def evaluated(self, key: EvaluationKey, values: dict[str, float], step: int) -> None:
        where = f"{key.chapter}/{key.epoch}/{key.position}/{key.number}"
        self._tell(f"evaluation/{where}", "any", values, step)

    def logged(
        self, place: ScriptPlace, values: dict[str, float], step: int, *, in_loop: bool, in_step: bool, behind: bool
    ) -> None:
        """`in_step`: all replicas are at the same place; `behind`: what is told here, an earlier process has told."""
        with self._lock:
            self._count = self._count + 1 if self._logs == (place, in_loop) else 1
            self._logs = (place, in_loop)
            number = self._count
        if behind or (not in_loop and number <= self._told_before(place)):
            return
        apart = in_loop and not in_step
        where = f"{place[0]}/{place[1]}/{step if apart else place[2]}"
        word_of: WordOf = "alone" if apart else "in charge"
        self._tell(f"{'loop' if in_loop else 'log'}/{where}/{number}", word_of, values, step)

    def account(self, account: ServersAccount) -> None:
        self._write(account)

    def saved(self, path: str | os.PathLike[str]) -> None:
        self._write(ModelSaved(os.fspath(path)))

    def calls_at(self, place: ScriptPlace) -> int:
        """Returns how often the script has logged there, outside of its loop: for a checkpoint that is taken there."""
        return max(self._told_before(place), self._count if self._logs == (place, False) else 0)

    def _told_before(self, place: ScriptPlace) -> int:
        return self._before[1] if self._before is not None and self._before[0] == place else 0

    def resume(self, place: ScriptPlace, calls: int) -> None:
        """An earlier run has logged so often at the place where this one goes on."""
        self._before = (place, calls)

    def _tell(self, key: str, word_of: WordOf, values: dict[str, float], step: int) -> None:
        if self._writer is None:
            return
        samples = max(self._board.get(row, Word.SAMPLES_SEEN) for row in range(self._board.replicas))
        key = f"{self._trainer}/{key}"
        self._write(Finding(key, word_of, time.time(), time.monotonic(), step, samples, values))

    def _write(self, message: Message) -> None:
        if self._writer is not None:
            # A supervisor that is gone takes its replicas with it: there is nothing to say to anybody.
            with contextlib.suppress(OSError), self._lock:
                self._writer.write(message)
