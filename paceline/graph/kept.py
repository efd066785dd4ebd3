"""Graphs that are kept on disk, so that the second run of a script need not capture again.

An entry's name is what its computation is made of (`content.py`), so an entry is right or is not found. It holds its
own checksum: one that is damaged is as good as none. Beside a graph stand notes of whoever uses it, what stages have
measured say. The folder is `$PACELINE_CACHE`, or `paceline` in the user's cache folder; the entries used last are
kept. `PACELINE_CACHE=` (empty) keeps nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from paceline.graph.call_graph import CallGraph
from paceline.graph.capture import Function
from paceline.graph.content import Content, NotKnown
from paceline.graph.shapes import AllShapes
from paceline.graph.written import CannotBeWritten, read, written

FOLDER = "PACELINE_CACHE"
MOST_ENTRIES = 200
_DIGEST = 20


class KeptGraph:
    """The graph of a computation: kept by an earlier run, or captured now, among those of its other `shapes`."""

    def __init__(
        self,
        function: Function,
        model: nn.Module,
        given: object,
        shapes: AllShapes,
        begin: Callable[[bool], None] = lambda will_be_kept: None,
    ) -> None:
        """`begin` is called before a graph is captured, with whether it can be kept as far as is known."""
        self._key: str | None = None
        self._tensors: list[torch.Tensor] = []
        if folder() is not None:
            with contextlib.suppress(NotKnown, RecursionError):
                content = Content(function, model, given)
                self._key, self._tensors = content.key, content.tensors
        found = self._found()
        self.is_proven = found is not None  # whoever keeps it has proven it
        if found is None:
            begin(self._key is not None)
        shapes.see(given)
        self.graph: CallGraph = shapes.graph(function, model, given) if found is None else found

    def _found(self) -> CallGraph | None:
        """Returns the graph of an earlier run. What cannot be read, whatever it is, is as good as none."""
        note = self.note("graph")
        with contextlib.suppress(Exception):
            return None if note is None else read(note, self._tensors)
        return None

    def keep(self) -> None:
        """Keeps the graph, which has been found right."""
        if self._key is not None and not self.is_proven:
            with contextlib.suppress(CannotBeWritten):
                self.add_note("graph", written(self.graph, self._tensors))

    def note(self, name: str) -> bytes | None:
        """Returns what was kept with this graph under a name, if it is there and whole."""
        return None if self._key is None else _read(f"{self._key}.{name}")

    def add_note(self, name: str, content: bytes) -> None:
        """Keeps something with this graph."""
        if self._key is not None:
            _write(f"{self._key}.{name}", content)


def folder() -> Path | None:
    """Returns the folder of kept graphs; None if nothing is to be kept."""
    given = os.environ.get(FOLDER)
    if given == "":
        return None
    if given is not None:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def _read(name: str) -> bytes | None:
    at = folder()
    if at is None:
        return None
    try:
        content = (at / name).read_bytes()
        os.utime(at / name)
    except OSError:
        return None
    digest, rest = content[:_DIGEST], content[_DIGEST:]
    return rest if hashlib.blake2b(rest, digest_size=_DIGEST).digest() == digest else None


def _write(name: str, content: bytes) -> None:
    """Writes an entry, whole or not at all. A full or a read-only disk is no reason to end a run."""
    at = folder()
    if at is None:
        return
    with contextlib.suppress(OSError):
        at.mkdir(parents=True, exist_ok=True)
        _make_room(at)
        with tempfile.NamedTemporaryFile(dir=at, delete=False) as file:
            try:
                file.write(hashlib.blake2b(content, digest_size=_DIGEST).digest() + content)
                file.close()
                os.replace(file.name, at / name)
            except OSError:
                Path(file.name).unlink(missing_ok=True)


def _make_room(at: Path) -> None:
    """Removes the entries that were used longest ago."""
    entries = sorted((entry.stat().st_mtime, entry.path) for entry in os.scandir(at))
    for _, path in entries[: max(0, len(entries) - MOST_ENTRIES + 1)]:
        Path(path).unlink(missing_ok=True)
