"""What a container asks of its journal: where everything is noted that must not be forgotten.

The journals that keep something are in `durability`: in a folder, or in the memory of another server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from paceline.central.messages.notes import ShareNotes
from paceline.central.messages.records import AnyRecord


class Journal:
    """Base of all, which keeps nothing: what happens to a container is lost with its process."""

    keeps = False  # whether what is written survives this process

    def __init__(self) -> None:
        # Held while something is written, and while a snapshot is taken:
        self.lock: AbstractContextManager[object] = contextlib.nullcontext()
        self.renew: Callable[[], None] = lambda: None  # has a snapshot taken, from which the journal goes on

    @property
    def due(self) -> bool:
        """Whether there is so much since the last snapshot that another should be taken."""
        return False

    def seal(self, record: AnyRecord, body: Sequence[memoryview]) -> Sequence[memoryview]:
        """A record as it is written; made before the lock is taken, for it may take a while."""
        return ()

    def write(self, record: AnyRecord, parts: Sequence[memoryview]) -> int:
        """Append a sealed record; up to where to `flush`, which is not done here, so that one does it for many."""
        return 0

    def made(self) -> None:
        """The step that was written last has been made."""

    def flush(self, upto: int | None = None) -> None:
        """Wait until so much, or all that is written, survives this process. Not with a lock held."""

    def snapshot(self, tensors: Mapping[str, torch.Tensor], notes: ShareNotes, *, wait: bool) -> None:
        """Go on from a snapshot, whose tensors nobody changes any more; call it with the lock held.

        It is written while training goes on, unless somebody has to `wait` for it.
        """

    def move(self, addresses: list[str]) -> None:
        """The container's servers are known under these addresses now."""

    def look(self) -> None:
        """Called now and then, also when nothing is written."""

    def remove(self) -> None:
        """Nothing of it is needed any more."""
