"""What a training process tells its supervisor of what it found: one message after the other in a pipe of its own.

    process ── length, msgpack ──▶ pipe ──▶ supervisor ──▶ events.jsonl, display, summary

A pipe, because what was written to it outlives a process that is killed, and the supervisor learns of it at once.
Every replica tells: who of them is heard, and that each finding counts once, is the supervisor's to decide
(`watch/found.py`), which alone knows who has died. That is what the keys are for: a finding that all replicas make has
the same key in all of them, and in a process that is started again.

A number need not be finite, so messages are msgpack: JSON has no word for such a number.
"""

from __future__ import annotations

import os
from typing import Literal

import msgspec

MOST_NAME = 100  # letters of a finding's name
WordOf = Literal["any", "in charge", "alone"]
_LENGTH_BYTES = 4


class TrainingBegan(msgspec.Struct, frozen=True, tag="began"):
    """The first step was made, with models cut and data there; when it began."""

    at: float  # by the clock of the machine, which all its processes have in common
    cutting_s: float | None = None  # how long it took before that to find out how the model is cut


class Finding(msgspec.Struct, frozen=True, tag="found"):
    """Numbers by name: an evaluation's, or what a script logs."""

    key: str  # which one of the run
    # Whose word it is. any: all replicas tell the same, so the first is right; in charge: all tell it under this key,
    # each its own numbers; alone: each tells its own, under its own key
    word_of: WordOf
    time: float  # of day
    at: float  # by the clock of the machine
    step: int
    samples: int
    values: dict[str, float]


class ServersAccount(msgspec.Struct, frozen=True, tag="account"):
    """What the servers know of the gradients so far."""

    staleness: dict[int, int]  # of those that went into a step: how many had which
    late: int  # came when their step was closed
    dropped: int  # were too stale

    @property
    def mean_staleness(self) -> float:
        count = sum(self.staleness.values())
        return sum(steps * times for steps, times in self.staleness.items()) / count if count else 0.0

    @property
    def thrown_away(self) -> float:
        """Which share of all gradients was computed for nothing."""
        wasted = self.late + self.dropped
        return wasted / total if (total := wasted + sum(self.staleness.values())) else 0.0


class TrialAsked(msgspec.Struct, frozen=True, tag="asked"):
    """The script has asked for a parameter of its trial."""

    name: str


class ModelSaved(msgspec.Struct, frozen=True, tag="saved"):
    """The script has saved a checkpoint."""

    path: str


Message = ModelSaved | TrainingBegan | Finding | ServersAccount | TrialAsked


class MessageWriter:
    """The process's end of the pipe."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, message: Message) -> None:
        """Raises OSError if nobody reads any more."""
        body = msgspec.msgpack.encode(message)
        data = memoryview(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
        while data:
            data = data[os.write(self._descriptor, data) :]


class MessageReader:
    """The supervisor's end: messages out of whatever pieces come.

    >>> reader = MessageReader()
    >>> body = msgspec.msgpack.encode(TrainingBegan(1.5))
    >>> data = len(body).to_bytes(4, "little") + body
    >>> reader.read(data[:7]), reader.read(data[7:] + data[:2])
    ([], [TrainingBegan(at=1.5, cutting_s=None)])
    """

    def __init__(self) -> None:
        self._rest = b""
        self._decoder = msgspec.msgpack.Decoder(Message)

    def read(self, data: bytes) -> list[Message]:
        """Returns those that are complete. Of what is none, as a stranger's write to the pipe would be, the rest is
        passed over."""
        self._rest += data
        found: list[Message] = []
        while len(self._rest) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._rest[:_LENGTH_BYTES], "little")
            if len(self._rest) < end:
                break
            body, self._rest = self._rest[_LENGTH_BYTES:end], self._rest[end:]
            try:
                found.append(self._decoder.decode(body))
            except (msgspec.ValidationError, msgspec.DecodeError):
                self._rest = b""
        return found
