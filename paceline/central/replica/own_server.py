"""An owner inside the process whose threads are the replicas: a server like any other, that nobody else can reach.

Replicas speak to it as to servers in processes of their own, and share its memory. It ends with the process, so it
outlives nobody: whoever wants that has servers of their own (`--servers`).
"""

from __future__ import annotations

import secrets
import socket
import sys
import threading

from paceline.central.client.server_view import ServerAddresses
from paceline.central.server.process import SWITCH_EVERY_S
from paceline.central.server.server import Server

CONTAINER = "model"


class OwnServer:
    """A server that is a thread of this process."""

    def __init__(self) -> None:
        token = secrets.token_hex(16)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._server = Server(self._listener, token=token)
        self.addresses = ServerAddresses([self._server.address], CONTAINER, token)
        sys.setswitchinterval(SWITCH_EVERY_S)
        self._thread = threading.Thread(target=self._server.run, name="paceline-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it, with all that it has."""
        self._server.stop()
        self._thread.join()
        self._listener.close()
        self._server.close()
