"""The door of the meeting of hosts: host 0 listens, and lets in who knows the token; the others go there.

Threads do it, since it may take long, and what has come of it is put into the meeting's inbox: `Arrived`, with a
connection on which the other side has shown who it is, or why there will be none.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from paceline.errors import LaunchError, PacelineError, SecurityError, StrategyError
from paceline.launch.host_greeting import OtherVersion, greet, hear, notice_silence, welcome
from paceline.launch.host_messages import HOST_MESSAGES, HostComes, HostMessage
from paceline.launch.latecomers import Arrived
from paceline.net.frames import Channel, ConnectionLost, FrameError
from paceline.net.secure import HANDSHAKE_S, Keys, wrap_client, wrap_server
from paceline.net.strangers import Strangers, accept_all

CONNECT_S = 5.0
RETRY_S = 0.2


@dataclass(frozen=True)
class HostsSetting:
    """How this host finds the others, and what has to be the same on all of them."""

    host: int
    hosts: int
    rendezvous: str
    token: str
    keys: Keys | None
    settings: Mapping[str, str]  # by name, as they were typed or are by default
    timeout_s: float
    lost_after_s: float  # of silence, that a host is taken to be gone
    fewest: int | None = None  # hosts that are enough to begin, and others may join; None: all, and nobody may


class MeetingDoor:
    """This host's side of it, open from the beginning."""

    def __init__(
        self,
        setting: HostsSetting,
        put: Callable[[int, Arrived | PacelineError], None],
        say: Callable[[str], None],
    ) -> None:
        """`put` is given, with the host's number, whoever has arrived and what went wrong; from other threads."""
        self._setting, self._put, self._say = setting, put, say
        self.give_up_at = time.monotonic() + setting.timeout_s
        self.address: str | None = None  # at which the others reach host 0, if it is this one
        self._closed = threading.Event()
        self._closing, self._for_good = threading.Lock(), False
        self._strangers = Strangers()
        self._listener: socket.socket | None = None
        if setting.host == 0:
            self._listener = self._listening()
            self.address = str(self._listener.getsockname()[0])
            how = (self._listener, self._strangers, self._admit, self._closed, say)
            threading.Thread(target=accept_all, args=how, name="paceline-meeting", daemon=True).start()
        else:
            threading.Thread(target=self._go, name="paceline-meeting", daemon=True).start()

    def shut(self) -> None:
        """Nobody is let in any more, and this host goes nowhere."""
        self._closed.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shuts it for good: whoever is still on the way in is not put anywhere any more."""
        self.shut()
        with self._closing:
            self._for_good = True
        if self._listener is not None:
            self._listener.close()

    # ── host 0 ───────────────────────────────────────────────────────────────────────────────────────────

    def _listening(self) -> socket.socket:
        host, port = _host_and_port(self._setting.rendezvous)
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=1024)
        except OSError as error:
            expected = f"host 0 cannot listen there ({error.strerror}), give an address of its own and a free port"
            raise StrategyError("rdzv-endpoint", self._setting.rendezvous, expected) from error

    def _admit(self, connection: socket.socket, address: str) -> None:
        """Let in whoever knows the token; anybody else is sent away, and changes nothing."""
        channel: Channel[HostMessage] | None = None
        try:
            connection.settimeout(HANDSHAKE_S)
            keys = self._setting.keys
            secured = wrap_server(connection, keys) if keys is not None else connection
            channel = Channel(secured, HOST_MESSAGES, most_body_bytes=0)
            welcome(channel, self._setting.token)
            self._strangers.remove(connection)
            notice_silence(secured, self._setting.lost_after_s)
            comes = hear(channel, HostComes, self._setting.timeout_s)
            with self._closing:
                if self._for_good:  # nobody would take it any more
                    channel.close()
                else:
                    self._put(comes.host, Arrived(channel, "", comes))
        except OtherVersion as error:
            self._put(0, error)
        except (PacelineError, OSError) as error:
            self._say(f"turned away whoever came from {address.rpartition(':')[0]}: {error}")
            channel.close() if channel is not None else connection.close()
        finally:
            self._strangers.remove(connection)

    # ── the other hosts ──────────────────────────────────────────────────────────────────────────────────

    def _go(self) -> None:
        """Reach host 0, which may be started later than this one."""
        host, port = _host_and_port(self._setting.rendezvous)
        while not self._closed.is_set():
            try:
                connection = socket.create_connection((host, port), timeout=CONNECT_S)
                self._put(0, self._arrive(connection))
                return
            except (SecurityError, FrameError) as error:
                self._put(0, LaunchError(f"host 0 at {self._setting.rendezvous} does not let this host in: {error}"))
                return
            except (OSError, ConnectionLost) as error:
                why = getattr(error, "strerror", None) or error
            if time.monotonic() > self.give_up_at:
                waited = f"within {self._setting.timeout_s:g} s ({why})"
                sentence = (
                    f"host 0 cannot be reached at {self._setting.rendezvous} {waited}: start it with --node-rank 0"
                )
                self._put(0, LaunchError(sentence))
                return
            self._closed.wait(RETRY_S)

    def _arrive(self, connection: socket.socket) -> Arrived:
        address, keys = str(connection.getsockname()[0]), self._setting.keys
        secured = wrap_client(connection, keys) if keys is not None else connection
        channel: Channel[HostMessage] = Channel(secured, HOST_MESSAGES, most_body_bytes=0)
        try:
            greet(channel, self._setting.token)
        except BaseException:
            channel.close()
            raise
        notice_silence(secured, self._setting.lost_after_s)
        return Arrived(channel, address)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
