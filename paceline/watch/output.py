"""What this process writes to stdout and stderr: whoever writes never waits, and nothing is lost.

A reader may pause for hours (`| less`), and a pipe may refuse what it has no room for. So a thread does the writing.
What it has not got rid of waits: a few megabytes in memory, and what comes after those in a file without a name, until
that has been read to its end.

    write ─┬─▶ memory, at most 4 MB ─┬─▶ thread ─▶ stdout
           └─▶ file, once that is full ─┘

A reader that has gone (`| head -1`) is no error: the training has not.
"""

from __future__ import annotations

import collections
import contextlib
import io
import os
import select
import sys
import tempfile
import threading
from pathlib import Path
from typing import BinaryIO, TextIO

MOST_IN_MEMORY = 4 << 20
AT_ONCE = 1 << 16
SAY_AFTER_S = 2.0  # that the run has ended, and only its output has not
_STDOUT, _STDERR = 1, 2


class Output:
    """One stream, by its descriptor."""

    def __init__(self, descriptor: int, spill_to: Path | None = None, complain_to: Output | None = None) -> None:
        """`spill_to`: a folder for what does not fit into memory. `complain_to`: who is told, once, of an error."""
        self._descriptor = descriptor
        self._spill_to = spill_to
        self._complain_to = complain_to
        self.waiting = 0  # bytes
        self.mid_line = False
        self._pieces: collections.deque[bytes | range] = collections.deque()  # those in the file by where they are
        self._in_memory = 0
        self._file: BinaryIO | None = None
        self._file_end = 0
        self._nobody_reads = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, data: bytes) -> None:
        """Have this written, in its turn."""
        with self._changed:
            if self._nobody_reads or not data:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="paceline-output", daemon=True)
                thread.start()
                self._thread = thread
            self.mid_line = not data.endswith(b"\n")
            self.waiting += len(data)
            if self._in_memory + len(data) > MOST_IN_MEMORY:
                data = data[self._spill(data) :]
            if data:
                self._pieces.append(data)
                self._in_memory += len(data)
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all is written; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.waiting, timeout_s)

    def _spill(self, data: bytes) -> int:
        """Put it at the end of the file; return how much there was room for: memory is the last place there is."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._spill_to, buffering=0)  # noqa: SIM115
            written = os.pwrite(self._file.fileno(), data, self._file_end)
        except OSError:
            return 0
        start, self._file_end = self._file_end, self._file_end + written
        last = self._pieces[-1] if self._pieces else b""
        if isinstance(last, range) and last.stop == start:
            self._pieces[-1] = range(last.start, self._file_end)
        else:
            self._pieces.append(range(start, self._file_end))
        return written

    def _take(self) -> bytes:
        piece = self._pieces.popleft()
        if isinstance(piece, bytes):
            self._in_memory -= len(piece)
            return piece
        assert self._file is not None
        data = os.pread(self._file.fileno(), min(len(piece), AT_ONCE), piece.start)
        if rest := piece[len(data) :]:
            self._pieces.appendleft(rest)
        elif not self._pieces:
            self._file_end = 0
            self._file.truncate(0)
        return data

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.waiting)
                data = self._take()
            try:
                write_all(self._descriptor, data)
            except OSError as error:
                self._failed(error)
            with self._changed:
                self.waiting = 0 if self._nobody_reads else self.waiting - len(data)
                self._changed.notify_all()

    def _failed(self, error: OSError) -> None:
        """A full disk may have room again later; a reader that has gone does not come back."""
        if isinstance(error, BrokenPipeError):
            with self._changed:
                self._nobody_reads = True
        elif self._complain_to is not None:
            what = f"paceline: stdout cannot be written ({error.strerror}): what is missing is in the run folder\n"
            self._complain_to.write(what.encode())
            self._complain_to = None


class Outputs:
    """Both streams: one and the same if they lead to the same place, so that the order stays."""

    def __init__(self, spill_to: Path | None = None) -> None:
        self.err = Output(_STDERR, spill_to)
        same = os.path.sameopenfile(_STDOUT, _STDERR)
        self.out = self.err if same else Output(_STDOUT, spill_to, complain_to=self.err)

    @property
    def behind(self) -> bool:
        """Whether so much waits to be read that only what has to be known should be added."""
        return max(self.out.waiting, self.err.waiting) > AT_ONCE

    @property
    def busy(self) -> bool:
        """Whether a line is unfinished, or much of what came before still waits."""
        return self.out.mid_line or self.err.mid_line or self.behind

    def end_lines(self) -> None:
        """What is written next begins with a new line."""
        for output in (self.out, self.err):
            if output.mid_line:
                output.write(b"\n")

    def close(self) -> None:
        """Wait until whoever reads has read all of it. A signal ends the wait, and the process."""
        before = 0
        while not self.out.wait(SAY_AFTER_S) and self.out.waiting != before:
            before = self.out.waiting
        if self.out.waiting:
            self.err.write(b"paceline: the run has ended, its output is not read to the end; Ctrl-C ends without\n")
        self.out.wait()
        self.err.wait()


class OutputText(io.TextIOBase):
    """An output of a terminal, for those who write text to files, such as a console."""

    encoding = "utf-8"

    def __init__(self, output: Output) -> None:
        self._output = output

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._output.write(text.encode(errors="backslashreplace"))
        return len(text)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of it, however long that takes, also to a pipe that says that it is full instead of waiting."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            room = select.poll()
            room.register(descriptor, select.POLLOUT)
            room.poll()


def put(stream: TextIO, data: bytes) -> None:
    """Write at once; nothing happens if whoever read it has gone."""
    with contextlib.suppress(OSError):
        write_all(stream.fileno(), data)


def open_missing_streams() -> None:
    """Have a stdin, stdout and stderr even if the process was started without: whatever is opened next would be it."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115
