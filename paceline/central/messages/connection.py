"""A client's connection to one server: asks again when it breaks, until a deadline with a name.

Every request is safe to repeat, so a cut of some seconds, or a server that is started again, is a pause and not an
error: the connection is made anew, introduced again (`introduce`), and the request sent once more.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from paceline import __version__
from paceline.central.messages.replies import REPLIES, Challenge, Done, Refused, Reply, Waiting
from paceline.central.messages.requests import Hello, Proof
from paceline.errors import PacelineError, SecurityError, Stalled
from paceline.net.frames import Channel, ConnectionLost, FrameError, tune
from paceline.net.secure import Keys, proof_of, wrap_client

CONNECT_S = 5.0
FIRST_CONTACT_S = 5.0  # for a user who may have mistyped an address
GREETINGS = 3  # so often one that was refused, or not understood, is tried
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5

Kinds = type | tuple[type, ...]


class Connection:
    """A connection to one server, for one thread at a time."""

    def __init__(
        self,
        address: str,
        *,
        token: str,
        keys: Keys | None,
        who: str,
        name: str,
        timeout_s: float,
        first_contact_s: float | None = None,
    ) -> None:
        """`first_contact_s`: how long to try to reach a server that was never reached, if not for `timeout_s`."""
        self.address = address
        self.name = name
        self._hello = Hello(version=__version__, who=who)
        self._token = token
        self._keys = keys
        self._who = who
        self._timeout_s = timeout_s
        self._channel: Channel[Reply] | None = None
        self._given_up = False
        self._refusals = 0  # of greetings, in a row
        self._first_contact_s = first_contact_s  # None: there was one, or it may take as long as any other
        self.introduce: Callable[[], None] | None = None  # after every connect, before any other request
        self.while_waiting: Callable[[], None] | None = None  # between two questions whether there is an answer yet

    def call(
        self,
        request: object,
        expected: Kinds,
        *,
        body: Callable[[], Iterable[memoryview]] | None = None,
        body_bytes: int | None = None,
        read: Callable[[Channel[Reply], int], None] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Return the reply to a request. `body` makes the body, again if need be; `read` takes that of the reply."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        give_up = time.monotonic() + limit
        pause, why = FIRST_PAUSE_S, "it does not answer"
        while True:
            try:
                return self._once(request, expected, body, body_bytes, read, give_up)
            except ConnectionLost as error:
                self.disconnect()
                why = str(error)
            if self._first_contact_s is not None:
                limit = min(limit, self._first_contact_s)
                give_up = min(give_up, time.monotonic() + limit)
            if self._given_up:
                raise PacelineError(f"the connection to {self.name} was given up")
            if time.monotonic() + pause >= give_up:
                raise Stalled(f"{self._who} waited {limit:g} s for {self.name} at {self.address}: {why}")
            time.sleep(pause)
            pause = min(LONGEST_PAUSE_S, 2 * pause)

    def wait(self, request: object, expected: Kinds, **how: Any) -> Any:
        """Return the reply to a request whose answer may take others' time: ask again for as long as there is none."""
        give_up = time.monotonic() + self._timeout_s
        kinds = expected if isinstance(expected, tuple) else (expected,)
        while True:
            reply = self.call(request, (*kinds, Waiting), **how)
            if not isinstance(reply, Waiting):
                return reply
            if time.monotonic() > give_up:
                raise Stalled(f"{self._who} waited {self._timeout_s:g} s for {reply.why}")
            if self.while_waiting is not None:
                self.while_waiting()

    def _once(
        self,
        request: object,
        expected: Kinds,
        body: Callable[[], Iterable[memoryview]] | None,
        body_bytes: int | None,
        read: Callable[[Channel[Reply], int], None] | None,
        give_up: float,
    ) -> Any:
        if self._channel is None:
            self._connect(give_up)
        assert self._channel is not None
        left_s = max(1.0, give_up - time.monotonic())
        self._channel.send(request, body() if body is not None else (), body_bytes=body_bytes, timeout_s=left_s)  # type: ignore[arg-type]
        reply, length = self._channel.receive(max(1.0, give_up - time.monotonic()))
        if isinstance(reply, Refused):
            self._channel.end_body()
            raise PacelineError(reply.sentence)
        if read is not None and not isinstance(reply, Waiting):
            read(self._channel, length)
        self._channel.end_body()
        if not isinstance(reply, expected):
            raise PacelineError(f"{self.name} answered {type(request).__name__} with {type(reply).__name__}")
        return reply

    def _connect(self, give_up: float) -> None:
        host, _, port = self.address.rpartition(":")
        try:
            timeout_s = min(CONNECT_S, max(0.1, give_up - time.monotonic()))
            raw = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"it cannot be reached ({getattr(error, 'strerror', None) or error})") from error
        tune(raw)
        raw.settimeout(None)
        try:
            connection = wrap_client(raw, self._keys) if self._keys is not None else raw
        except SecurityError as error:
            raise SecurityError(
                f"{self.name} at {self.address} was not trusted or did not trust us: {error}"
            ) from error
        self._channel = Channel(connection, REPLIES)
        self._channel.trusted = True
        try:
            self._greet(give_up)
            if self.introduce is not None:
                self.introduce()
        except BaseException:
            self.disconnect()
            raise

    def _greet(self, give_up: float) -> None:
        try:
            answer = self._once(self._hello, (Done, Challenge), None, None, None, give_up)
            if isinstance(answer, Challenge):
                self._once(Proof(proof=proof_of(self._token, answer.nonce)), Done, None, None, None, give_up)
        except ConnectionLost as error:
            # A server with keys takes a greeting in plain for noise, and says nothing.
            hint = ", as one with keys does to a client without" if self._keys is None and self._first_contact_s else ""
            raise ConnectionLost(f"{error}{hint}") from error
        except PacelineError as error:
            self._refusals += 1
            if self._refusals < GREETINGS:
                raise ConnectionLost(str(error)) from error  # it may have been damaged on the way
            if not isinstance(error, FrameError):
                raise SecurityError(f"{self.name} at {self.address} refuses: {error}") from error
            raise SecurityError(
                f"{self.name} at {self.address} cannot be understood: {error}; use the same version on both sides, and "
                "keys on both or none"
            ) from error
        self._first_contact_s, self._refusals = None, 0

    def disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def give_up(self) -> None:
        """Have whoever waits in here fail. From any thread."""
        self._given_up = True
        channel = self._channel
        if channel is not None:
            channel.interrupt()

    close = disconnect
