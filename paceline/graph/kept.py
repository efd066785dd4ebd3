"""Graphs that are kept on disk, so that the second run of a script need not capture again.

An entry's name is what its computation comes to: its operators with their numbers, forward and backward, the model's
modules and shapes, and which packages are installed (`noted_operators.py`). A graph that is found is used only if its
own operators are those. An entry holds its own checksum, too: one that is damaged is as good as none. Beside a graph
stand notes of whoever uses it, what stages have measured say. What cannot be followed without values is not kept.

The folder is `graphs` in the user's cache folder (`cache_folder.py`). It is the user's alone: what others could have
written is not read. The entries used last are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from paceline.cache_folder import cache_folder
from paceline.graph.call_graph import CallGraph
from paceline.graph.proof import GraphProof
from paceline.graph.shapes import AllShapes
from paceline.graph.written import CannotBeWritten, read, written

FOLDER = "graphs"
MOST_ENTRIES = 200
_DIGEST = 20
_BEGUN = ".begun-"  # what a file is called until it is written
_OURS = re.compile(rf"[0-9a-f]{{40}}\.[a-z0-9]+|{re.escape(_BEGUN)}\w+")


class KeptGraph:
    """The graph of a computation: kept by an earlier run, or captured now, among those of its other `shapes`."""

    def __init__(
        self,
        proof: GraphProof,
        shapes: AllShapes,
        begin: Callable[[bool], None] = lambda will_be_kept: None,
        proven: str = "",
    ) -> None:
        """`proof`: of the computation. `begin` is called before a graph is captured, with whether it can be kept as far
        as is known. `proven`: the `entry` that another device of this run has just proven, for which that is enough."""
        self._key: str | None = None
        self._constants = proof.constants
        self.entry = ""  # the graph's name and checksum, once it is on disk
        if folder() is not None and (content := proof.content) is not None:
            self._key = _checksum((_surroundings() + content).encode(errors="surrogatepass")).hex()
        found = self._found()
        if found is not None and self.entry != proven and not _is_right(found, proof):
            self._forget()
            found = None
        self._was_kept = self.is_proven = found is not None
        self._proof = None if self.is_proven else proof  # which holds a batch
        if found is None:
            begin(self._key is not None)
        shapes.see(proof.given)
        self.graph: CallGraph = found or shapes.graph(proof.function, proof.model, proof.given)

    def prove(self) -> None:
        """Raises a ModelError unless the graph computes what the function does."""
        if self._proof is not None:
            self._proof.prove(self.graph)
        self.is_proven, self._proof = True, None

    def _found(self) -> CallGraph | None:
        """Returns the graph of an earlier run. What cannot be read, whatever it is, is as good as none."""
        note = self.note("graph")
        if note is not None:
            with contextlib.suppress(Exception):
                found = read(note, self._constants)
                self.entry = f"{self._key} {_checksum(note).hex()}"
                return found
        return None

    def _forget(self) -> None:
        """Drops a graph that is of something else after all, and what was noted of it."""
        self.entry = ""
        at = folder()
        if at is not None:
            with contextlib.suppress(OSError):
                for path in at.glob(f"{self._key}.*"):
                    path.unlink(missing_ok=True)

    def keep(self) -> None:
        """Keeps the graph, which has been found right."""
        if self._key is not None and not self._was_kept:
            with contextlib.suppress(CannotBeWritten):
                content = written(self.graph, self._constants)
                self.add_note("graph", content)
                self.entry = f"{self._key} {_checksum(content).hex()}"

    def note(self, name: str) -> bytes | None:
        """Returns what was kept with this graph under a name, if it is there and whole."""
        return None if self._key is None else _read(f"{self._key}.{name}")

    def add_note(self, name: str, content: bytes) -> None:
        """Keeps something with this graph."""
        if self._key is not None:
            _write(f"{self._key}.{name}", content)


def _is_right(graph: CallGraph, proof: GraphProof) -> bool:
    """Returns whether a graph computes what the function computes. One that cannot be run does not."""
    with contextlib.suppress(Exception):
        return proof.holds(graph)
    return False


@cache
def _surroundings() -> str:
    """Returns the versions of Python and of all packages, and which code of ours this is."""
    found = [sys.version, torch.__version__, torch.backends.cpu.get_cpu_capability()]
    for at in sys.path:
        if os.path.isdir(at):
            found += sorted(name for name in os.listdir(at) if name.endswith((".dist-info", ".egg-info")))
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.append(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}")
    return hashlib.blake2b("\n".join(found).encode()).hexdigest()


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────


def folder() -> Path | None:
    """Returns the folder of kept graphs; None if nothing is to be kept, or it is not this user's alone."""
    at = cache_folder()
    if at is None:
        return None
    try:
        return at / FOLDER if _is_private((at / FOLDER).lstat(), stat.S_ISDIR) else None
    except FileNotFoundError:
        return at / FOLDER
    except OSError:
        return None


def _is_private(found: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    """Returns whether nobody but this user could have written it."""
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return is_kind(found.st_mode) and found.st_uid == os.geteuid() and not others_write


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()


def _read(name: str) -> bytes | None:
    at = folder()
    if at is None:
        return None
    try:
        with open(os.open(at / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not _is_private(os.fstat(file.fileno()), stat.S_ISREG):
                return None
            content = file.read()
            os.utime(file.fileno())
    except OSError:
        return None
    digest, rest = content[:_DIGEST], content[_DIGEST:]
    return rest if _checksum(rest) == digest else None


def _write(name: str, content: bytes) -> None:
    """Writes an entry, whole or not at all. A full or a read-only disk is no reason to end a run."""
    at = folder()
    if at is None:
        return
    with contextlib.suppress(OSError):
        at.parent.mkdir(parents=True, exist_ok=True)
        at.mkdir(mode=0o700, exist_ok=True)
        _make_room(at)
        with tempfile.NamedTemporaryFile(dir=at, prefix=_BEGUN, delete=False) as file:
            try:
                file.write(_checksum(content) + content)
                file.close()
                os.replace(file.name, at / name)
            except OSError:
                Path(file.name).unlink(missing_ok=True)


def _make_room(at: Path) -> None:
    """Removes the entries that were used longest ago, and nothing that is not ours."""
    entries: list[tuple[float, str]] = []
    for entry in os.scandir(at):
        with contextlib.suppress(OSError):  # another run may have removed it
            if _OURS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                entries.append((entry.stat(follow_symlinks=False).st_mtime, entry.path))
    for _, path in sorted(entries)[: max(0, len(entries) - MOST_ENTRIES + 1)]:
        with contextlib.suppress(OSError):
            Path(path).unlink(missing_ok=True)
