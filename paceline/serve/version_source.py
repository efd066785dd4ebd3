"""Where versions of a model come from: a checkpoint's file, or whatever else there is to take one from.

A version is a copy, in memory that has no name: what happens to its source afterwards is of no concern to those who
have the version, nor to those who replace them.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Protocol

from paceline.errors import CheckpointError
from paceline.memory import segment

MOST_TRIES, PAUSE_S = 20, 0.05  # to read a file that is being written
_PIECE = 1 << 24

FileIdentity = tuple[int, int, int]


@dataclass(frozen=True)
class TakenVersion:
    """The descriptor of a copy, in safetensors' format, and after which step of training it was, if that is known."""

    copy: int
    step: int | None = None


class VersionSource(Protocol):
    """What a pool takes versions from. Every call may wait, and is made in a thread."""

    words: str  # for sentences
    problem: str  # why it cannot be looked at now; empty if it can

    def take(self) -> TakenVersion:
        """Returns a copy of what there is now."""

    def has_changed(self) -> bool:
        """Returns whether there is something else now than was taken last, and it is complete."""

    def close(self) -> None:
        """Lets go of it."""


class FileSource:
    """A checkpoint that is written anew in its place."""

    problem = ""

    def __init__(self, path: str) -> None:
        self.words = self._path = path
        self._taken: FileIdentity | None = None
        self._seen: FileIdentity | None = None

    def take(self) -> TakenVersion:
        """Returns a copy of what the file has now; of one that is being written, when it rests."""
        for _ in range(MOST_TRIES):
            before = _identity_of(self._path)
            copy = _copied(self._path)
            if _identity_of(self._path) == before:
                self._taken = self._seen = before
                return TakenVersion(copy)
            os.close(copy)
            time.sleep(PAUSE_S)
        raise CheckpointError(f"{self._path} is being written all the time: write another file, and rename it")

    def has_changed(self) -> bool:
        """Returns whether another file is there, and has been so since the last call: one that is being written is
        left alone until it rests."""
        now = _identity_of(self._path)
        settled, self._seen = now == self._seen, now
        return settled and now is not None and now != self._taken

    def close(self) -> None:
        """There is nothing to let go of."""


def _copied(path: str) -> int:
    """Returns the descriptor of memory that has what the file has now."""
    copy = -1
    try:
        with open(path, "rb") as file:
            copy = segment.make("checkpoint", max(1, os.fstat(file.fileno()).st_size))
            offset = 0
            while sent := os.sendfile(copy, file.fileno(), offset, _PIECE):
                offset += sent
            os.ftruncate(copy, max(1, offset))
            return copy
    except OSError as error:
        if copy >= 0:
            os.close(copy)
        raise CheckpointError(f"{path} could not be read ({error.strerror})") from error


def _identity_of(path: str) -> FileIdentity | None:
    """Returns what changes when a file is replaced or written; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
