"""What a journal must have: a few bytes beside its files, written after them and before anything is acknowledged.

    │ magic │ journal │ newest snapshot │ last record │ checksum │

A log alone cannot tell whether it once was longer. A process that is killed leaves a record that is not whole, or one
that is whole and was never acknowledged: both come after what the mark says. If the files end before that, somebody has
cut or removed what was acknowledged.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import xxhash

from paceline.central.durability.record_file import ADVICE
from paceline.errors import CheckpointError

MARK = "mark"

_FORM = struct.Struct("<4sQQQQ")
_MAGIC = b"PLM1"


@dataclass(frozen=True)
class Mark:
    """How far a journal is."""

    journal: int
    snapshot: int  # 0: none is there yet
    record: int

    @classmethod
    def read(cls, folder: Path) -> Mark | None:
        """Return what is there; None: nothing."""
        path = folder / MARK
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}); {ADVICE}") from error
        if len(content) != _FORM.size or _FORM.unpack(content)[-1] != xxhash.xxh3_64_intdigest(content[:-8]):
            raise CheckpointError(f"{path} is damaged: its checksum is not that of its content; {ADVICE}")
        return cls(*_FORM.unpack(content)[1:-1])

    @property
    def _bytes(self) -> bytes:
        content = _FORM.pack(_MAGIC, self.journal, self.snapshot, self.record, 0)[:-8]
        return content + struct.pack("<Q", xxhash.xxh3_64_intdigest(content))

    def create(self, folder: Path) -> int:
        """Write it for the first time, and return a descriptor of it."""
        draft = folder / f"{MARK}.tmp"
        draft.write_bytes(self._bytes)
        draft.replace(folder / MARK)
        return self.open(folder)

    @staticmethod
    def open(folder: Path) -> int:
        return os.open(folder / MARK, os.O_WRONLY | os.O_CLOEXEC)

    def write(self, descriptor: int) -> None:
        """Write it in place. So few bytes of one page are there as a whole or not at all, whenever a kill comes."""
        os.pwrite(descriptor, self._bytes, 0)
