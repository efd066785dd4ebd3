"""Whole lines out of a stream that comes in pieces."""

from __future__ import annotations

MOST_LINE_BYTES = 1 << 20  # a command line with all its arguments is far below


class LineReader:
    """
    >>> reader = LineReader()
    >>> reader.read(b"one\\ntw"), reader.read(b"o\\n")
    ([b'one'], [b'two'])
    """

    def __init__(self) -> None:
        self._unfinished = b""

    def read(self, data: bytes) -> list[bytes]:
        """The lines that are whole now; what is longer than any line of ours is thrown away."""
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if len(self._unfinished) > MOST_LINE_BYTES:
            self._unfinished = b""
        return lines
