"""What a script has forgotten to save: kept in the run folder, so that a run that has ended is never a lost model.

    runs/20251115-184203-train/models/model.safetensors      the checkpoint of a run that called trainer.save never

With mirrored replicas, or in one process, it is written when the process in charge ends, in whatever way Python ends by
itself. Parameters on servers are kept by the servers, which outlive all replicas (`central/server/process.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import weakref
from collections.abc import Callable
from pathlib import Path

from paceline.errors import PacelineError
from paceline.run_place import MODELS, Place


class KeptModel:
    """Has one trainer's model kept at the end."""

    def __init__(self, place: Place, write: Callable[[Path], None]) -> None:
        """`write` writes a checkpoint, if there is something to keep."""
        self.consistent = False  # whether steps have been made, and none is half done
        self._write, self._process = write, os.getpid()
        self._folder: Path | None = None
        trains = (place.recording, place.servers, place.serving, place.reaching) == (None,) * 4 and place.checkpoints
        alone = not place.is_spread  # else optimizer state lies on other hosts, which may have ended by then
        if place.started_by == "paceline run" and place.run_folder is not None and trains and alone:
            self._folder = Path(place.run_folder).resolve() / MODELS  # a script may go elsewhere
            # Not for longer than anybody has the trainer: a script may make many, one after another.
            atexit.register(_keep_if_alive, weakref.ref(self))

    def keep(self) -> None:
        """Keep it now. Later calls do nothing."""
        folder, self._folder = self._folder, None
        if folder is None or not self.consistent or os.getpid() != self._process:
            return
        with contextlib.suppress(OSError, PacelineError):  # the run has ended well, or says itself why not
            folder.mkdir(exist_ok=True)
            names = (f"model{f'-{number}' if number > 1 else ''}.safetensors" for number in itertools.count(1))
            self._write(next(folder / name for name in names if not (folder / name).exists()))


def _keep_if_alive(found: weakref.ref[KeptModel]) -> None:
    if (kept := found()) is not None:
        kept.keep()
