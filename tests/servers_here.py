"""Servers as threads of the test's own process."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.central.server.server import Server
from paceline.net.secure import Keys

TOKEN = "a token that nobody can guess"


class Running:
    """A server as a thread of this process."""

    def __init__(self, keys: Keys | None = None) -> None:
        self.said: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.server = Server(self._listener, token=TOKEN, keys=keys, say=self.said.append)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()

    @property
    def address(self) -> str:
        return self.server.address

    def connect(self) -> socket.socket:
        host, port = self.address.split(":")
        return socket.create_connection((host, int(port)), timeout=20)

    def said_soon(self, words: str) -> bool:
        end = time.monotonic() + 20
        while not any(words in line for line in self.said):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def close(self) -> None:
        self.server.stop()
        self._thread.join()
        self.server.close()
        self._listener.close()


def last_words(connection: socket.socket, sent: bytes) -> None:
    """Say that and no more, and wait for the other side to close; for ever is an error."""
    connection.settimeout(15)
    try:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        raise
    except OSError:
        pass  # it has closed already


@contextlib.contextmanager
def running(keys: Keys | None = None) -> Iterator[Running]:
    with contextlib.closing(Running(keys)) as found:
        yield found


def write_token(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    return folder
