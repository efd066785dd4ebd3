"""The checkpoints of the best trials, side by side in one folder: what an ensemble is made of.

    top/1-trial-0007.safetensors    1-trial-0007.json: how its model is made (checkpoint_note.py)
    top/2-trial-0003.safetensors    …

A trial's checkpoint is the .safetensors file that its script has written last into `pl.trial().folder`. What
`trainer.save` keeps beside it, the state of the training and the one before, is none.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from paceline.checkpoint_note import CheckpointNote, note_beside
from paceline.search.tune_folder import TrialRecord
from paceline.watch.kept_folder import write_whole

TOP = "top"
_BESIDE_A_CHECKPOINT = re.compile(r"\.(previous(-\d+)?|(step-\d+-)?[0-9a-f]{8}\.training)\.safetensors$")


def is_beside_a_checkpoint(name: str) -> bool:
    """Whether a file of this name is one that `trainer.save` keeps beside a checkpoint."""
    return _BESIDE_A_CHECKPOINT.search(name) is not None


def checkpoint_in(folder: Path) -> Path | None:
    """The checkpoint that the script has left in that folder of a trial."""
    found = [path for path in _files(folder) if not is_beside_a_checkpoint(path.name)]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def _files(folder: Path) -> Iterator[Path]:
    """But for those of run folders, which are not the script's."""
    for path in folder.rglob("*.safetensors"):
        if not path.relative_to(folder).parts[0].startswith(("run-", "fold-")):
            yield path


def keep_best(folder: Path, ranked: Sequence[TrialRecord], count: int) -> list[Path]:
    """Make `top/` hold the checkpoints of the first `count` of these, and return them."""
    top = folder / TOP
    best = [record for record in ranked if record.end == "done"][:count]
    wanted = {
        top / f"{place}-trial-{record.number:04}{_fold(note)}.safetensors": (folder / path, note)
        for place, record in enumerate(best, 1)
        for path, note in zip(record.checkpoints, record.notes, strict=True)
    }
    if wanted:
        top.mkdir(exist_ok=True)
    for old in top.glob("*.safetensors"):
        if old not in wanted:
            old.unlink()
            note_beside(old).unlink(missing_ok=True)
    for target, (source, note) in wanted.items():
        with contextlib.suppress(FileNotFoundError):  # somebody has removed it since
            _link(source, target)
            write_whole(note_beside(target), msgspec.json.encode(note) + b"\n")
    return [target for target in wanted if target.exists()]


def _fold(note: CheckpointNote) -> str:
    return f"-fold-{note.trial.fold}" if note.trial is not None and note.trial.fold is not None else ""


def _link(source: Path, target: Path) -> None:
    """The same bytes under another name, or a copy where a disk has no such thing; whole or not at all."""
    unfinished = target.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    try:
        os.link(source, unfinished)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, unfinished)
    os.replace(unfinished, target)
    unfinished.unlink(missing_ok=True)  # of two names of one file, replacing does nothing
