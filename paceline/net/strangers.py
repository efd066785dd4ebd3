"""Connections that have not shown yet who they are.

Anybody can connect and say nothing, so there is a limit to strangers, in all and from one address. Beyond it the oldest
one goes, and not the newest: a friend says who it is at once, and is no stranger any more when the next one comes.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

MOST_STRANGERS = 256
MOST_OF_ONE_ADDRESS = 64
PAUSE_S = 0.25  # after a connection that could not be accepted


class Strangers:
    """Those of one listening socket. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, _Stranger] = {}  # the oldest first

    def add(self, connection: socket.socket, address: str) -> None:
        """Let one more wait, and send the oldest away if there are too many then."""
        with self._lock:
            self._waiting[connection] = _Stranger(address, connection.dup())
            crowds = Counter(one.address for one in self._waiting.values())
            ((crowd, count),) = crowds.most_common(1)
            if count > MOST_OF_ONE_ADDRESS or len(self._waiting) > MOST_STRANGERS:
                oldest = next(one for one in self._waiting if self._waiting[one].address == crowd)
                with self._waiting.pop(oldest).handle as handle, contextlib.suppress(OSError):
                    handle.shutdown(socket.SHUT_RDWR)  # whoever serves it closes it

    def remove(self, connection: socket.socket) -> None:
        with self._lock:
            if (known := self._waiting.pop(connection, None)) is not None:
                known.handle.close()


@dataclass(frozen=True)
class _Stranger:
    address: str
    handle: socket.socket  # on the connection: TLS takes the socket itself away


def accept_all(
    listener: socket.socket,
    strangers: Strangers,
    serve: Callable[[socket.socket, str], None],
    ended: threading.Event,
    say: Callable[[str], None],
) -> None:
    """Have a thread of its own `serve` whoever connects, from which address, until `ended` and the listener is shut.

    A crowd may use up the files or threads that a process may have: that costs a connection, and no more.
    """
    while not ended.is_set():
        connection: socket.socket | None = None
        try:
            connection, address = listener.accept()
            strangers.add(connection, address[0])
            where = f"{address[0]}:{address[1]}"
            threading.Thread(target=serve, args=(connection, where), daemon=True).start()
        except (OSError, RuntimeError) as error:
            if connection is not None:
                strangers.remove(connection)
                connection.close()
            elif ended.is_set() or getattr(error, "errno", None) in (errno.EBADF, errno.EINVAL):
                return
            say(f"a connection could not be accepted ({getattr(error, 'strerror', None) or error})")
            ended.wait(PAUSE_S)
