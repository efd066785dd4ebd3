"""Frames: how a request and its tensors look on a connection.

    ┌─────┬─────────┬────────┬────────┬──────────┬──────────┬─────────────────┬─────────────────┬──────────┐
    │ PLN │ version │ header │ body   │ checksum │ checksum │ header: msgspec │ body: raw bytes │ checksum │
    │ 3 B │ 1 B     │ 4 B    │ 8 B    │ of the   │ of all   │ a fixed schema  │ of tensors      │ of the   │
    │     │         │ long   │ long   │ header   │ before   │                 │                 │ body     │
    └─────┴─────────┴────────┴────────┴──────────┴──────────┴─────────────────┴─────────────────┴──────────┘

Each part has a checksum of 8 bytes, because TCP's own lets one damaged packet in 65,536 pass; a body has none if it is
empty, or goes over TLS, which lets nothing pass. Whoever reads a body to its end knows that it is what was sent; before
that nothing may be done with it. Lengths are bounded, closely so until the other side is `trusted`, and what is
allocated follows what has arrived, not what was announced. Headers are decoded into fixed schemas (never pickled). A
frame that is wrong in any way ends the connection: there is no way to find the beginning of the next one. Bodies go
straight from and into the memory of tensors, a few megabytes at a time, and never through `bytes`.

Over TLS (`secure`) a channel is the same; only the socket differs.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import msgspec
import xxhash

from paceline.errors import PacelineError

PROTOCOL = 3
MAGIC = b"PLN"
MOST_HEADER_BYTES = 16 << 20
MOST_STRANGERS_HEADER_BYTES = 64 << 10  # before the other side has shown who it is
MOST_BODY_BYTES = 1 << 38
SLICE_BYTES = 4 << 20  # as fast as all at once; 1 MB is 5 % slower, 256 KB 15 %
RECEIVED_AT_ONCE_BYTES = 1 << 20  # what is summed up is still in the cache, and few are woken for it
MANY_BYTES = 128 << 10  # so many that have not come yet are waited for together,
TOGETHER_S = 0.05  # but not for longer than this
SMALL_BYTES = 64 << 10  # a frame up to this size leaves in one piece: one system call, one packet, one TLS record
MOST_QUOTED = 200
_PRELUDE = struct.Struct("<3sBIQQ")
_CHECKSUM = struct.Struct("<Q")

Header = TypeVar("Header")


class FrameError(PacelineError):
    """What arrived is not a frame of ours: the connection cannot be used any more."""


class ConnectionLost(PacelineError):
    """The other side has gone, or does not answer in time."""


class FrameDamaged(ConnectionLost):
    """What has arrived is not what was sent. As after any loss, a request may be sent again on another connection."""


class Channel(Generic[Header]):
    """One side of a connection: sends frames, and receives those whose headers are of the given schema.

    For one thread at a time, but for `interrupt`. After an error nothing more can be received; after one of sending
    (the frame is incomplete then) nothing at all.
    """

    def __init__(
        self,
        connection: socket.socket,
        decoder: msgspec.msgpack.Decoder[Header],
        *,
        most_body_bytes: int = MOST_BODY_BYTES,
    ) -> None:
        self.trusted = False
        self._connection = connection
        self._is_tls = isinstance(connection, ssl.SSLSocket)
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._most_body_bytes = most_body_bytes
        self._body_left = 0
        self._body_sum: xxhash.xxh3_64 | None = None  # of what was read of the body
        self._understood = False  # a frame of ours has come
        self._lost: str | None = None  # why nothing can be received any more
        self._interrupted = False
        self._together = True  # many bytes of this body are waited for together
        tune(connection)

    # ── sending ──────────────────────────────────────────────────────────────────────────────────────────

    def send(
        self,
        header: msgspec.Struct,
        body: Iterable[memoryview] = (),
        *,
        body_bytes: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """A whole frame. With `body_bytes` the parts may be made one by one while they are sent.

        `timeout_s` is for each slice, not for the whole: a large body on a slow link is fine, one that nobody
        takes is not.
        """
        parts = body if body_bytes is not None else [_flat(part) for part in body]
        length = body_bytes if body_bytes is not None else sum(map(len, parts))
        front, total = _front(self._encoder.encode(header), length), self._new_sum(length)
        try:
            if body_bytes is None and len(front) + length <= SMALL_BYTES:
                if total is not None:
                    for part in parts:
                        total.update(part)
                self._push([memoryview(b"".join((front, *parts, _packed(total))))], timeout_s)
                return
            left, before = length, [memoryview(front)]
            for piece in _slices(parts):
                left -= len(piece)
                assert left >= 0, f"the parts of a body are longer than the {length} bytes announced"
                if total is not None:
                    total.update(piece)  # which has it in the cache for what follows
                after = [memoryview(_packed(total))] if total is not None and not left else []
                self._push([*before, piece, *after], timeout_s)
                before = []
            if before:  # there is no body
                self._push(before, timeout_s)
            assert left == 0, f"the parts of a body are {left} bytes short of the {length} announced"
        except BaseException:
            self.interrupt()  # half a frame is out: nothing that follows could be understood
            raise

    def _new_sum(self, body_bytes: int) -> xxhash.xxh3_64 | None:
        return xxhash.xxh3_64() if body_bytes and not self._is_tls else None

    def _push(self, pieces: list[memoryview], timeout_s: float | None) -> None:
        """Sends all of them, in one go if the socket can: each by itself would be a packet, and wake the other side."""
        try:
            if self._interrupted:
                raise ConnectionLost("the connection was given up")
            if timeout_s is not None:
                self._connection.settimeout(timeout_s)
            sent = self._connection.sendmsg(pieces) if len(pieces) > 1 and not self._is_tls else 0
            for piece in pieces:
                if sent < len(piece):
                    self._connection.sendall(piece[sent:])
                sent = max(0, sent - len(piece))
        except (OSError, ValueError) as error:
            if timeout_s is not None and isinstance(error, TimeoutError):
                raise ConnectionLost(f"the other side took nothing for {timeout_s:g} s") from error
            raise ConnectionLost(f"the connection broke while sending ({_reason(error)})") from error
        finally:
            self._wait_forever(timeout_s)

    # ── receiving ────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, timeout_s: float | None = None) -> tuple[Header, int]:
        """The next frame's header, and how many bytes of body are to be read next; `timeout_s` is for the whole."""
        if self._body_left and self._lost is None:
            raise self._wrong(f"{self._body_left} bytes of a body were left unread")
        limit = _Limit(timeout_s)
        front = self._take(_PRELUDE.size + (_CHECKSUM.size if self._understood else 0), limit)
        prelude = front[: _PRELUDE.size]
        magic, version, header_bytes, body_bytes, header_sum = _PRELUDE.unpack(prelude)
        if not self._understood:  # who sends no frames of ours sends no checksums either
            self._check_protocol(prelude, magic, version)
            front += self._take(_CHECKSUM.size, limit)
        if _CHECKSUM.unpack_from(front, _PRELUDE.size) != (xxhash.xxh3_64_intdigest(prelude),):
            raise self._damaged("the beginning of a frame")
        self._check_protocol(prelude, magic, version)
        self._understood = True
        most_header_bytes = MOST_HEADER_BYTES if self.trusted else MOST_STRANGERS_HEADER_BYTES
        if header_bytes > most_header_bytes or body_bytes > self._most_body_bytes:
            raise self._wrong(
                f"a frame of {header_bytes} + {body_bytes} bytes is larger than the "
                f"{most_header_bytes} + {self._most_body_bytes} allowed here"
            )
        encoded = self._take(header_bytes, limit)
        if header_sum != xxhash.xxh3_64_intdigest(encoded):
            raise self._damaged("the header of a frame")
        try:
            header: Header = self._decoder.decode(encoded)
        except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
            # The decoder quotes what it got.
            raise self._wrong(f"a header does not fit its schema: {printable(str(error)[:MOST_QUOTED])}") from error
        self._body_left, self._body_sum = body_bytes, self._new_sum(body_bytes)
        self._together = True
        return header, body_bytes

    def _check_protocol(self, prelude: bytearray, magic: bytes, version: int) -> None:
        if magic != MAGIC:
            tls = prelude[0] in range(0x14, 0x18) and prelude[1] == 3  # how every record of TLS begins
            raise self._wrong(f"what arrived is {'TLS' if tls else 'something else'} and not a frame of this protocol")
        if version != PROTOCOL:
            raise self._wrong(f"the other side speaks version {version} of the protocol and this one {PROTOCOL}")

    def read_body(self, into: memoryview, timeout_s: float | None = None) -> None:
        """The next bytes of the body, as many as `into` is long; `timeout_s` is for all of them."""
        flat = _flat(into)
        if len(flat) > self._body_left:
            raise self._wrong(f"a body is {len(flat) - self._body_left} bytes too short")
        self._take_body(flat, _Limit(timeout_s))

    def read_whole_body(self, most: int, timeout_s: float | None = None) -> bytearray:
        """A small body, as bytes."""
        if self._body_left > most:
            raise self._wrong(f"a body of {self._body_left} bytes is larger than the {most} allowed here")
        return self._take(self._body_left, _Limit(timeout_s), body=True)

    def end_body(self) -> None:
        """All of the body must have been read."""
        if self._body_left:
            raise self._wrong(f"a body is {self._body_left} bytes too long")

    def skip_body(self, timeout_s: float | None = None) -> None:
        """What is left of the body, read and thrown away.

        Who refuses a request does this before it answers: the other side may still be sending, and with bytes unread a
        close would be a reset, which takes the answer along.
        """
        limit = _Limit(timeout_s)
        nowhere = memoryview(bytearray(min(self._body_left, SLICE_BYTES)))
        while self._body_left:
            self._take_body(nowhere[: self._body_left], limit)

    def _take_body(self, into: memoryview, limit: _Limit) -> None:
        """Bytes of the body; the last of them only if all are what was sent."""
        self._fill(into, limit, self._body_sum)
        left = self._body_left - len(into)
        if self._body_sum is not None and into.nbytes and not left:
            (expected,) = _CHECKSUM.unpack(self._take(_CHECKSUM.size, limit))
            if expected != self._body_sum.intdigest():
                raise self._damaged("the body of a frame")
        self._body_left = left

    def _take(self, count: int, limit: _Limit, *, body: bool = False) -> bytearray:
        """Bytes in memory of our own, which grows with what arrives: announcing a lot costs us nothing."""
        taken = bytearray(min(count, SMALL_BYTES))
        filled = 0
        while True:
            with memoryview(taken) as whole, whole[filled:] as rest:
                self._take_body(rest, limit) if body else self._fill(rest, limit)
            filled = len(taken)
            if filled == count:
                return taken
            taken.extend(bytes(min(filled, count - filled)))

    def _fill(self, into: memoryview, limit: _Limit, total: xxhash.xxh3_64 | None = None) -> None:
        if self._lost is not None:
            raise ConnectionLost(f"the connection cannot be used any more: {self._lost}")
        try:
            self._receive_into(into, limit, total)
        except (OSError, ValueError) as error:
            if limit.timeout_s is not None and isinstance(error, TimeoutError):
                self._lost = f"the other side did not answer within {limit.timeout_s:g} s"
            else:
                self._lost = f"the connection broke ({_reason(error)})"
            raise ConnectionLost(self._lost) from error
        finally:
            self._wait_forever(limit.timeout_s)
        if self._lost is not None:
            raise ConnectionLost(self._lost)

    def _receive_into(self, into: memoryview, limit: _Limit, total: xxhash.xxh3_64 | None) -> None:
        connection, filled, length = self._connection, 0, len(into)
        while filled < length:
            at_once = min(RECEIVED_AT_ONCE_BYTES, length - filled)
            self._await_together(at_once, limit)
            if limit.timeout_s is not None:
                connection.settimeout(limit.left())
            try:
                count = connection.recv_into(into[filled : filled + at_once])
            except (BlockingIOError, ssl.SSLWantReadError, TimeoutError) as error:
                # Another thread sends with a time limit at this moment, and such a limit is the whole socket's.
                if isinstance(error, TimeoutError) and (limit.timeout_s is not None or error.errno is not None):
                    raise  # it is our own, or the kernel's
                _poll(connection, None)
                continue
            if self._interrupted or count == 0:
                self._lost = (
                    "the connection was given up" if self._interrupted else "the other side closed the connection"
                )
                return
            if total is not None:
                total.update(into[filled : filled + count])  # while it is in the cache
            filled += count

    def _await_together(self, count: int, limit: _Limit) -> None:
        """Returns when so many bytes are there, if they are many: to be woken for each packet of them takes longer than
        to copy it. On a slow link, or where the kernel has no room for so many, it returns before, and from then on at
        once."""
        low_water = count if count >= MANY_BYTES and self._together and not self._is_tls else 1
        if low_water > 1:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._together = _poll(self._connection, min(TOGETHER_S, limit.left()))
            # Only for that: a call that receives would wait for as many more as it has not taken yet.
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _wrong(self, sentence: str) -> FrameError:
        self._lost = sentence
        return FrameError(sentence)

    def _damaged(self, what: str) -> FrameDamaged:
        self._lost = f"{what} was damaged on the way: it does not fit its checksum"
        return FrameDamaged(self._lost)

    def _wait_forever(self, timeout_s: float | None) -> None:
        """Takes back what a `timeout_s` did to the socket."""
        if timeout_s is not None:
            with contextlib.suppress(OSError):  # it may be closed
                self._connection.settimeout(None)

    # ── ending ───────────────────────────────────────────────────────────────────────────────────────────

    def interrupt(self) -> None:
        """From any thread: whoever waits in this channel finds the connection lost. Its own thread then closes it."""
        self._interrupted = True
        with contextlib.suppress(OSError):
            # Not SSLSocket.shutdown: it removes the encryption first, and a thread that comes in between would send
            # plain text, or take what is encrypted for tensors.
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)

    def close(self) -> None:
        """Not while another thread is in here: the number of a closed socket is soon that of another connection."""
        self.interrupt()
        self._connection.close()


def _poll(connection: socket.socket, timeout_s: float | None) -> bool:
    """Whether there is something to receive; waits for it."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


class _Limit:
    """How long something may take, however many pieces it comes in."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s

    def left(self) -> float:
        """What is left. Of a byte now and then there is no end: what is over is over, even if more has just arrived."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def tune(connection: socket.socket) -> None:
    """What a connection of ours is set to; any socket may be given, also one that is tuned already.

    Small requests leave at once; a machine that vanished without a word is noticed within a minute. The sizes of the
    buffers are left to the kernel, which fits them to the link: a size given by hand was never faster on loopback, and
    is a limit on a long link.
    """
    try:
        connection.settimeout(None)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    except OSError as error:
        raise ConnectionLost(f"the connection broke ({_reason(error)})") from error


def printable(text: str) -> str:
    """Return what somebody else has said as one line for a terminal.

    >>> printable("version \\x1b[31m9")
    'version \\\\x1b[31m9'
    """
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _front(header: bytes, body_bytes: int) -> bytes:
    """What comes before a body."""
    prelude = _PRELUDE.pack(MAGIC, PROTOCOL, len(header), body_bytes, xxhash.xxh3_64_intdigest(header))
    return prelude + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(prelude)) + header


def _packed(total: xxhash.xxh3_64 | None) -> bytes:
    return b"" if total is None else _CHECKSUM.pack(total.intdigest())


def _slices(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yields bodies' bytes, as much at a time as is sent at once; a part is asked for when those before it are sent."""
    for part in map(_flat, parts):
        for start in range(0, len(part), SLICE_BYTES):
            yield part[start : start + SLICE_BYTES]


def _flat(view: memoryview) -> memoryview:
    """The same memory as bytes."""
    if view.format == "B" and view.ndim == 1:
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")  # an empty one cannot be cast


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
