"""One HTTP request, as ASGI gives it: its headers, its body up to a bound, and whether its client is still there."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import zlib
from typing import Any

from starlette.types import Receive, Scope

from paceline.serve.request_error import BAD, TOO_LARGE, RequestError, bad

LEAST_DEADLINE_S, MOST_DEADLINE_S = 0.001, 3600.0
LOOK_AFTER_S = 0.005  # most answers are there before anybody has to look whether the client still is


class GoneAway(Exception):
    """The client has closed its connection."""


class HttpRequest:
    """A request. Header names are in small letters; of one that is there twice, the last counts."""

    __slots__ = ("_headers", "receive", "scope")

    def __init__(self, scope: Scope, receive: Any = None) -> None:
        self.scope, self.receive = scope, receive
        self._headers: dict[bytes, bytes] = dict(scope["headers"])

    @property
    def path(self) -> str:
        """Returns the address it asks for."""
        found: str = self.scope["path"]
        return found

    @property
    def parts(self) -> dict[str, str]:
        """Returns the parts of its path that have names."""
        found: dict[str, str] = self.scope.get("path_params") or {}
        return found

    @property
    def content_type(self) -> str:
        """Returns what the body is said to be."""
        return self._headers.get(b"content-type", b"").decode("latin1")

    @property
    def authorization(self) -> bytes:
        """Returns what it wants to be let in by."""
        return self._headers.get(b"authorization", b"")

    def foreign_origin(self, *, only_local: bool) -> str | None:
        """Returns where the web page is from that has a browser ask this, if that is not this server; None: it is, or
        no page asks. The scheme does not matter, since whoever stands in front may speak https for this server.

        A page may have its own name lead to this machine once it is shown, and is then from where it asks. So one that
        only this machine reaches (`only_local`) is known by no name but localhost."""
        if b"origin" not in self._headers:
            return None
        origin, host = self._headers[b"origin"].decode("latin1"), self._headers.get(b"host", b"").decode("latin1")
        is_own = bool(host) and origin.lower() in (f"http://{host}".lower(), f"https://{host}".lower())
        return None if is_own and (not only_local or _is_local_name(host)) else origin

    @property
    def json_length(self) -> int | None:
        """Returns how many bytes of the body are JSON, if others follow."""
        if b"inference-header-content-length" not in self._headers:
            return None
        given = self._headers[b"inference-header-content-length"].decode("latin1")
        if not (given.isascii() and given.isdigit() and len(given) < 16):
            raise bad("Inference-Header-Content-Length", given[:40], "give a whole number of bytes")
        return int(given)

    def deadline_s(self, default_s: float) -> float:
        """Returns after how many seconds an answer is of no use."""
        if b"paceline-deadline" not in self._headers:
            return default_s
        given = self._headers[b"paceline-deadline"].decode("latin1")
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not LEAST_DEADLINE_S <= seconds <= MOST_DEADLINE_S:
            limits = f"from {LEAST_DEADLINE_S:g} to {MOST_DEADLINE_S:g}"
            raise bad("Paceline-Deadline", given[:40], f"give seconds {limits}")
        return seconds

    async def body(self, most: int) -> bytes:
        """Returns the body, unpacked, of at most so many bytes."""
        declared = self._headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > most:
            raise RequestError(TOO_LARGE, f"the body has {declared.decode()} bytes: {most} are allowed")
        pieces, size, more = [], 0, True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise GoneAway
            pieces.append(message["body"])
            size, more = size + len(pieces[-1]), message["more_body"]
            if size > most:
                raise RequestError(TOO_LARGE, f"the body has more than {most} bytes: that many are allowed")
        return self.unpacked(pieces[0] if len(pieces) == 1 else b"".join(pieces), most)

    def unpacked(self, body: bytes, most: int) -> bytes:
        """Returns the body as it was before it was packed, of at most so many bytes."""
        if len(body) > most:
            raise RequestError(TOO_LARGE, f"the body has {len(body)} bytes: {most} are allowed")
        if b"content-encoding" not in self._headers:
            return body
        encoding = self._headers[b"content-encoding"].decode("latin1").strip().lower()
        return body if encoding in ("", "identity") else _unpacked(body, encoding, most)


class WhileThere:
    """A part of a request's task that is given up when the client goes away: `GoneAway` is raised there."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._gone = receive, False
        self._looking: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._asking = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(LOOK_AFTER_S, self._begin_to_look)

    def _begin_to_look(self) -> None:
        self._looking = asyncio.ensure_future(self._look())

    async def _look(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        assert self._asking is not None
        self._gone = True
        self._asking.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if self._looking is not None:
            self._looking.cancel()
        if self._gone and kind is asyncio.CancelledError:
            raise GoneAway


def _is_local_name(host: str) -> bool:
    """Returns whether this is an address, or a name that every machine has for itself; with or without a port."""
    name, colon, port = host.rpartition(":")
    name = (name if colon and port.isdigit() else host).strip("[]").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
    return True


def _unpacked(body: bytes, encoding: str, most: int) -> bytes:
    if encoding not in ("gzip", "deflate"):
        raise bad("Content-Encoding", encoding[:40], "give gzip, deflate or none")
    unpacking = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        plain = unpacking.decompress(body, most + 1)
    except zlib.error as error:
        raise RequestError(BAD, f"the body is not {encoding}: {error}") from None
    if len(plain) > most:
        raise RequestError(TOO_LARGE, f"the body has more than {most} bytes: that many are allowed")
    if not unpacking.eof:
        raise RequestError(BAD, f"the body is not {encoding}: it is cut short")
    return plain
