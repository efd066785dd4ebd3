"""One line of JSON a request, for whoever keeps logs."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import IO, Any

import msgspec

from paceline.errors import InvalidInput


class AccessLog:
    """Writes to a file, which is appended to; to stderr for "-"; or nowhere."""

    def __init__(self, path: str | None) -> None:
        self._file: IO[bytes] | None = None
        self._lost = False  # what could not be written was said
        if path == "-":
            self._file = sys.stderr.buffer
        elif path is not None:
            try:
                self._file = open(path, "ab", buffering=0)  # noqa: SIM115
            except OSError as error:
                raise InvalidInput("access-log", path, f"it cannot be written ({error.strerror})") from error

    def write(self, scope: Any, status: int, seconds: float, size: int) -> None:
        """Notes a request; status 0 is one whose client went away."""
        if self._file is None:
            return
        client = scope.get("client")
        line = {
            "time": round(time.time(), 6),
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 6),
            "bytes": size,
        }
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
            self._lost = False
        except OSError as error:  # a full disk is no reason to answer nobody
            if not self._lost:
                self._lost = True
                with contextlib.suppress(OSError):
                    print(f"paceline: access-log cannot be written ({error.strerror})", file=sys.stderr, flush=True)
