"""Saves that replace one another: the order of steps that makes `write` atomic, and what `read` believes.

    1. write both files under temporary names in the same folder; fsync each
    2. rename the training file; fsync the folder          no model file names it yet
    3. give the old model file a second, temporary name    a hard link: `path` is never missing
    4. rename the new model file onto `path`               this commits
    5. rename the old one to `.previous`; fsync            not before 4: if `path` was damaged, `.previous` is
                                                           the only good save until the new one is committed
    6. remove what no model file names                     old training files, files of saves that were killed

Being killed before 4 leaves the old save, after it the new one, and step 6 of the next save tidies up. Step 6
also runs when an earlier one fails, and it decides by what the files say, not by how far the code came: so a
Ctrl-C at the worst moment cannot make it remove a file that is in use.

One process at a time saves to a path; any number may read it meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from paceline.checkpoint.tensor_file import (
    CONTAINER_KEY,
    CONTAINER_STEP_KEY,
    Checksums,
    Tensors,
    check_storable,
    read_metadata,
    read_tensors,
    write_tensors,
)
from paceline.errors import CheckpointError, InvalidInput

_VERSION = "2"
_VERSION_KEY, _CONTENTS_KEY, _CHECKSUM_KEY = "paceline", "paceline.contents", "paceline.contents.crc32"
_TRAINING_KEY = "paceline.training_file"
_SAVE_KEY = "paceline.save"
_OF_CONTAINERS = (CONTAINER_KEY, CONTAINER_STEP_KEY)
_SUFFIX = ".safetensors"
_TRAINING_NAME = r"\.(step-\d+-)?[0-9a-f]{8}\.training\.safetensors"
_PREVIOUS_NAME = r"\.previous(?:-(\d+))?\.safetensors"
_PARTIAL_NAME = r"\.[0-9a-f]{8}\.(model|training|previous)\.partial"

Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class Checkpoint:
    """What one save held, every tensor verified."""

    path: Path
    """The model file it was read from."""
    model: dict[str, torch.Tensor]
    training: dict[str, torch.Tensor]
    notes: dict[str, Any]


class _Contents(msgspec.Struct, frozen=True):
    """What a model file says of its save, in one JSON text in its metadata."""

    save: str
    notes: dict[str, Any]
    model: Checksums
    training: Checksums


def write(
    path: str | os.PathLike[str], model: Tensors, training: Tensors, notes: dict[str, Any], *, keep: int = 2
) -> None:
    """Make `path` this save, at once, and keep the `keep - 1` saves before it.

    `model` is a state_dict: every key's tensor is written out whole, tied ones too, so that `path` alone loads
    strictly in plain torch. `notes` is JSON: a tuple comes back as a list, and every key as text. The tensors
    must not change meanwhile. A failure leaves the save that was there.
    """
    path = _destination(path, keep)
    check_storable("model", model)
    check_storable("training", training)
    notes_bytes = len(_to_json(notes))
    try:
        try:
            _commit(path, model, training, notes, keep)
        finally:
            _remove_unused(path)
    except OSError as error:
        raise _unsaved(path, error, [model, training], notes_bytes) from error


def read(path: str | os.PathLike[str], *, fall_back: bool = False) -> Checkpoint:
    """The save at `path`; with `fall_back`, the newest one before it that is whole, if `path` is not.

    The tensors are mapped from the files, not copied. Safe while another process saves to `path`.
    """
    newest = Path(os.path.realpath(path))
    reasons = []
    for candidate in [newest, *(_previous_saves(newest) if fall_back else [])]:
        try:
            return _while_saved(candidate, _load)
        except CheckpointError as error:
            reasons.append(str(error))
    raise CheckpointError("; and ".join(reasons))


def read_model(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The model's own tensors alone: of a save, verified, its training file need not be there; or of any safetensors
    file."""
    return read_noted_model(path)[0]


def read_noted_model(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The same, and the notes: none of somebody else's file."""
    return _while_saved(Path(path), _load_model)


def write_model(path: str | os.PathLike[str], model: Tensors, notes: dict[str, Any]) -> None:
    """Make `path` a model without any training, at once. It is read by `read_model`, and nothing goes on from it."""
    path = _destination(path, keep=1)
    check_storable("model", model)
    partial = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.model.partial")
    try:
        try:
            write_tensors(partial, model, lambda checksums: _metadata(_Contents("", notes, checksums, {})))
            os.replace(partial, path)
            sync_folder(path.parent)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise _unsaved(path, error, [model], len(_to_json(notes))) from error


def _commit(path: Path, model: Tensors, training: Tensors, notes: dict[str, Any], keep: int) -> None:
    save = secrets.token_hex(4)
    step = notes.get("step")
    label = f"step-{step}-" if type(step) is int and step >= 0 else ""
    training_file = path.with_name(f"{path.stem}.{label}{save}.training{_SUFFIX}")

    def partial(kind: str) -> Path:
        return path.with_name(f".{path.stem}.{save}.{kind}.partial")

    def model_metadata(checksums: Checksums) -> dict[str, str]:
        return {**_metadata(_Contents(save, notes, checksums, training_checksums)), _TRAINING_KEY: training_file.name}

    training_checksums = write_tensors(partial("training"), training, lambda _: {_SAVE_KEY: save})
    write_tensors(partial("model"), model, model_metadata)
    os.replace(partial("training"), training_file)
    sync_folder(path.parent)
    # A file that is damaged, or no save at all, must not push a good one out of `.previous`.
    has_previous = keep > 1 and _looks_like_a_save(path)
    if has_previous:
        _second_name(path, partial("previous"))
    os.replace(partial("model"), path)
    if has_previous:
        _make_previous(partial("previous"), path, keep)
    sync_folder(path.parent)
    for old in _previous_saves(path)[keep - 1 :]:
        old.unlink()


def _unsaved(path: Path, error: OSError, files: list[Tensors], notes_bytes: int) -> CheckpointError:
    needed = notes_bytes + sum(tensor.nbytes for tensors in files for tensor in tensors.values())
    free = shutil.disk_usage(path.parent).free
    return CheckpointError(
        f"checkpoint {path} could not be saved ({error.strerror or error}): "
        f"it needs {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are free"
    )


def _metadata(contents: _Contents) -> dict[str, str]:
    text = _to_json(msgspec.structs.asdict(contents))
    return {
        "format": "pt",  # other readers of safetensors look for this
        _VERSION_KEY: _VERSION,
        _CONTENTS_KEY: text,
        _CHECKSUM_KEY: _checksum(text),
    }


def _second_name(path: Path, name: Path) -> None:
    try:
        os.link(path, name)
    except OSError:  # a filesystem without hard links, or somebody else's file: a copy costs time, not safety
        shutil.copyfile(path, name)


def _make_previous(save: Path, path: Path, keep: int) -> None:
    """Let `save` be the one before `path`, and those before it move one further."""
    names = [_previous(path, age) for age in range(1, keep)]
    gap = next((index for index, name in enumerate(names) if not name.exists()), len(names) - 1)
    for index in range(gap, 0, -1):
        os.replace(names[index - 1], names[index])
    os.replace(save, names[0])


def _remove_unused(path: Path) -> None:
    """Remove this checkpoint's temporary files, and those of its training files that no model file names.

    All model files, not just ours: a user may have copied `model.safetensors` to `best.safetensors`. And as long
    as one of ours cannot be read, every training file stays, since it may name any of them.
    """
    files = [file for file in path.parent.iterdir() if file.is_file()]
    unused = {file for file in files if _belongs(file, path, _TRAINING_NAME)}
    ours = {path, *_previous_saves(path)}
    for file in {file for file in files if file.suffix == _SUFFIX} - unused:
        try:
            unused.discard(path.parent / read_metadata(file).get(_TRAINING_KEY, ""))
        except (CheckpointError, OSError):
            if file in ours:
                unused.clear()
    unused |= {file for file in files if _belongs(file, path, _PARTIAL_NAME, hidden=".")}
    for file in unused:
        file.unlink(missing_ok=True)


def _looks_like_a_save(path: Path) -> bool:
    try:
        name = read_metadata(path).get(_TRAINING_KEY, "")
    except CheckpointError:
        return False
    return (path.parent / name).is_file()


def _while_saved(path: Path, load: Callable[[Path], Loaded]) -> Loaded:
    """Load `path`, and once more if a save replaced it while it was being read."""
    while True:
        before = _identity(path)
        try:
            return load(path)
        except (OSError, CheckpointError) as error:
            if _identity(path) != before:
                continue
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} could not be read ({error.strerror or error})") from error


def _load_model(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    metadata = read_metadata(path)
    if not _is_ours(metadata):
        return read_tensors(path, None), {}
    contents = _contents(path, metadata)
    return read_tensors(path, contents.model), contents.notes


def _load(path: Path) -> Checkpoint:
    metadata = read_metadata(path)
    contents = _contents(path, metadata)
    if not contents.save:
        raise CheckpointError(f"{path} holds a model and no training: go on from the checkpoint that it was made of")
    name = metadata.get(_TRAINING_KEY, "")
    if not re.fullmatch(r"[^/\\]+" + _TRAINING_NAME, name):
        raise CheckpointError(f"{path} is damaged: {name!r} does not name a training file")
    training_file = path.with_name(name)
    if not training_file.exists():
        raise CheckpointError(f"{path} is without its training file {name}: put it back beside it")
    if (save := read_metadata(training_file).get(_SAVE_KEY)) != contents.save:
        raise CheckpointError(f"{training_file} is of save {save}, but {path} is of save {contents.save}")
    model = read_tensors(path, contents.model)
    training = read_tensors(training_file, contents.training)
    return Checkpoint(path, model, training, contents.notes)


def _contents(path: Path, metadata: dict[str, str]) -> _Contents:
    """What the model file at `path` says of its save, if that is undamaged."""
    if not _is_ours(metadata):
        raise CheckpointError(
            f"{path} holds a model but no training state: load it with "
            "model.load_state_dict(safetensors.torch.load_file(path)) and start a new run from it"
        )
    if (version := metadata.get(_VERSION_KEY)) != _VERSION:
        raise CheckpointError(f"{path} is a checkpoint of format {version!r}, and this Paceline reads {_VERSION!r}")
    text = metadata.get(_CONTENTS_KEY, "")
    if _checksum(text) != metadata.get(_CHECKSUM_KEY):
        raise CheckpointError(f"{path} is damaged: the checksum of its notes does not match")
    try:
        return msgspec.convert(json.loads(text), _Contents)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{path} is damaged: its notes are not as they should be ({error})") from error


def _is_ours(metadata: dict[str, str]) -> bool:
    """Whether a file is of a save, or was before it was damaged: then nothing in it is believed unverified."""
    return any(key.startswith(_VERSION_KEY) and key not in _OF_CONTAINERS for key in metadata)


def _destination(path: str | os.PathLike[str], keep: int) -> Path:
    """The file to replace, behind any symbolic link, once it is known to be a name we can save under."""
    if keep < 1:
        raise InvalidInput("keep", keep, "give a whole number from 1 up")
    path = Path(os.path.realpath(path))
    if path.suffix != _SUFFIX:
        raise InvalidInput("path", str(path), f"give a file name that ends in {_SUFFIX}")
    if re.search(f"({_PREVIOUS_NAME}|{_TRAINING_NAME})$", path.name):
        raise InvalidInput("path", str(path), "give another name, this one is for files beside a checkpoint")
    if not os.path.isdir(path.parent):
        raise CheckpointError(f"checkpoint {path} could not be saved: there is no folder {path.parent}")
    if os.path.isdir(path):
        raise CheckpointError(f"checkpoint {path} could not be saved: there is a folder of that name")
    return path


def _previous(path: Path, age: int) -> Path:
    return path.with_name(f"{path.stem}.previous{f'-{age}' if age > 1 else ''}{_SUFFIX}")


def _previous_saves(path: Path) -> list[Path]:
    """The saves before the one at `path`, youngest first."""
    if not path.parent.is_dir():
        return []
    found = [(file, _belongs(file, path, _PREVIOUS_NAME)) for file in path.parent.iterdir()]
    return [file for _, file in sorted((int(match[1] or 1), file) for file, match in found if match)]


def _belongs(file: Path, path: Path, ending: str, *, hidden: str = "") -> re.Match[str] | None:
    return re.fullmatch(re.escape(hidden + path.stem) + ending, file.name)


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def sync_folder(folder: Path) -> None:
    """Have the names in a folder, as they are now, survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _to_json(value: object) -> str:
    try:
        return json.dumps(value, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"notes cannot be saved as JSON ({error}): give texts, numbers, lists, dicts") from error


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
