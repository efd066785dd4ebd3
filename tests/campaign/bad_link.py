"""A link between clients and a server that cuts, delays, damages, repeats and reorders what goes over it."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections import Counter

PIECE_BYTES = 64 << 10
HELD_S = 1.0  # at most, for another connection to overtake


class BadLink:
    """Listens in the server's place. Each chance is that of one piece, or of one connection."""

    def __init__(
        self,
        server: str,
        chance: random.Random,
        *,
        port: int = 0,
        cut: float = 0.0,
        delay: float = 0.0,
        damage: float = 0.0,
        repeat: float = 0.0,
        reorder: float = 0.0,
    ) -> None:
        host, number = server.split(":")
        self._server = (host, int(number))
        self._chance = chance
        self._cut, self._delay, self._damage, self._repeat, self._reorder = cut, delay, damage, repeat, reorder
        self.counts: Counter[str] = Counter()
        self._listener = socket.create_server(("127.0.0.1", port))
        self._closed = False
        self._connected = threading.Condition()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._connected:
                self.counts["connections"] += 1
                self._connected.notify_all()
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        recorded = bytearray() if self._chance.random() < self._repeat else None
        if self._chance.random() < self._reorder:
            self._be_overtaken()
        try:
            server = socket.create_connection(self._server)
        except OSError:
            client.close()
            return
        back = threading.Thread(target=self._pump, args=(server, client, None), daemon=True)
        back.start()
        self._pump(client, server, recorded)
        back.join()
        client.close()
        server.close()
        if recorded:
            self._say_again(bytes(recorded))

    def _be_overtaken(self) -> None:
        """What is sent on a later connection arrives before anything of this one."""
        with self._connected:
            before = self.counts["connections"]
            if self._connected.wait_for(lambda: self.counts["connections"] > before, HELD_S):
                self.counts["reordered"] += 1

    def _pump(self, source: socket.socket, target: socket.socket, recorded: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                if recorded is not None:
                    recorded += piece
                if self._chance.random() < self._delay:
                    self.counts["delayed"] += 1
                    time.sleep(self._chance.uniform(0.0, 0.1))
                if self._chance.random() < self._damage:
                    self.counts["damaged"] += 1
                    bit = self._chance.randrange(8 * len(piece))
                    changed = bytearray(piece)
                    changed[bit // 8] ^= 1 << bit % 8
                    piece = bytes(changed)
                if self._chance.random() < self._cut:
                    self.counts["cut"] += 1
                    target.sendall(piece[: self._chance.randrange(len(piece))])
                    break
                target.sendall(piece)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _say_again(self, recorded: bytes) -> None:
        """All that a client has said on a connection, once more on another."""
        self.counts["repeated"] += 1
        with contextlib.suppress(OSError), socket.create_connection(self._server, timeout=2.0) as server:
            server.sendall(recorded)
            server.shutdown(socket.SHUT_WR)
            while server.recv(PIECE_BYTES):
                pass
