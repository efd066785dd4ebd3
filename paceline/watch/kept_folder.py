"""A folder for what several runs are made for, so that whoever was stopped or killed goes on where it was.

A file in it says what was asked for. The same may be asked for again, and finds what was done before; anything else is
refused, because results of two questions would lie side by side. Files are there as a whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from paceline.errors import InvalidInput

UNFINISHED = ".unfinished"  # what somebody was at who was killed


def open_kept(path: Path, file: str, what: str, asked: Mapping[str, Any]) -> None:
    """Make the folder, or find that the same was asked for in it. `what`: it holds, in words; `file`: says so."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if (path / file).exists():
            _check_same(path, file, what, asked)
        elif any(not found.name.endswith(UNFINISHED) for found in path.iterdir()):
            raise InvalidInput("folder", str(path), "it holds something else, give a new folder")
        else:
            write_whole(path / file, msgspec.json.format(msgspec.json.encode(asked)))
    except OSError as error:
        raise InvalidInput("folder", str(path), f"it cannot be used ({error.strerror}), give another") from error


def _check_same(path: Path, file: str, what: str, asked: Mapping[str, Any]) -> None:
    before = msgspec.json.decode((path / file).read_bytes(), type=dict[str, Any])
    wanted = msgspec.json.decode(msgspec.json.encode(asked), type=dict[str, Any])
    for name in {**before, **wanted}:
        if before.get(name) != wanted.get(name):
            expected = f"it holds {what} with {name} {before.get(name)!r}, give a new folder or ask for the same"
            raise InvalidInput("folder", str(path), expected)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    unfinished = path.with_name(f"{path.name}{UNFINISHED}")
    unfinished.write_bytes(data + b"\n")
    os.replace(unfinished, path)


def script_digest(script: str) -> str:
    """The same for the same text of a script."""
    return xxhash.xxh64(Path(script).read_bytes()).hexdigest() if os.path.isfile(script) else ""
