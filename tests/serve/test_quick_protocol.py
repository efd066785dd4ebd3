"""HTTP as it should not be sent: every request gets one answer, in order, or ends the connection with a sentence;
nobody gets a second request in behind a first. What is refused on its headers is no different."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.responses import JSONResponse, Response
from uvicorn.server import ServerState

from paceline.serve import quick_protocol
from paceline.serve.http_request import HttpRequest
from paceline.serve.quick_protocol import MOST_HEAD, QuickProtocol

LONG_S = 90.0
Answers = Callable[..., list[tuple[int, Any, bool]]]
LIVE = b"GET /live HTTP/1.1\r\nHost: here\r\n\r\n"


class Echo:
    """Answers with what was asked, by tasks or, at `/p`, in short; refuses who has a header that says so."""

    def __init__(self, quick: bool) -> None:
        self._quick = quick
        self.noted: list[int] = []
        self.begun: list[asyncio.Future[Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        await self._echo(scope, body)(scope, receive, send)

    def is_asking(self, request: HttpRequest) -> bool:
        return request.path == "/p" and (self._quick or b"refuse" in dict(request.scope["headers"]))

    def refused(self, request: HttpRequest) -> Response | None:
        refuses = dict(request.scope["headers"]).get(b"refuse") == b"yes"
        return JSONResponse({"error": "no"}, 429) if refuses else None

    def is_short(self, request: HttpRequest) -> bool:
        return b"long" not in dict(request.scope["headers"])

    def begin(self, request: HttpRequest, body: bytes) -> Any:
        if body == b"wrong":
            return JSONResponse({"error": "wrong"}, 400)
        if body == b"broken":
            raise ValueError("this is printed")
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if body != b"never":
            asyncio.get_running_loop().call_later(0.001, lambda: future.done() or future.set_result(body))
        self.begun.append(future)
        return SimpleNamespace(future=future)

    def finish(self, request: HttpRequest, begun: Any) -> Response:
        return self._echo(request.scope, begun.future.result())

    def note(self, scope: Any, status: int, seconds: float, size: int) -> None:
        self.noted.append(status)

    @staticmethod
    def _echo(scope: Any, body: bytes) -> Response:
        return JSONResponse({"path": scope["path"], "body": body.decode("latin1")})


@pytest.fixture(params=[False, True], ids=["by a task", "in short"])
def answers(request: pytest.FixtureRequest) -> Callable[..., list[tuple[int, Any, bool]]]:
    return partial(said, request.param)


def said(quick: bool, *pieces: bytes, ends: bool = False, pause_s: float = 0) -> list[tuple[int, Any, bool]]:
    """What a connection says to these bytes: of each answer the status, the JSON, and whether it is the last; then that
    the connection is closed, unless one asks with LIVE and is answered. `ends`: the client sends nothing more."""

    async def talk() -> bytes:
        config = uvicorn.Config(Echo(quick), http=QuickProtocol, ws="none", lifespan="off", log_config=None)
        config.load()
        loop = asyncio.get_running_loop()
        state = ServerState()
        server = await loop.create_server(
            lambda: QuickProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        if not ends:
            writer.write(b"GET /last HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        found = await asyncio.wait_for(reader.read(), LONG_S)
        writer.close()
        server.close()
        return found

    bytes_left, found = uvloop.run(talk()), []
    while bytes_left:
        head, _, rest = bytes_left.partition(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
        closes = b"connection: close" in head
        found.append((int(head.split(b" ")[1]), json.loads(rest[:length]), closes))
        bytes_left = rest[length:]
    return found


def post(headers: str, body: bytes = b"", version: str = "1.1") -> bytes:
    return f"POST /p HTTP/{version}\r\nHost: here\r\n{headers}\r\n\r\n".encode() + body


LAST = (200, {"path": "/last", "body": ""}, True)
ECHOED = (200, {"path": "/p", "body": "hello"}, False)
REFUSED = (429, {"error": "no"}, False)


@pytest.mark.parametrize(
    "odd",
    [
        post("Content-Length: 5\r\nTransfer-Encoding: chunked", b"0\r\n\r\n" + LIVE),
        post("Transfer-Encoding: chunked\r\nContent-Length: 5", b"0\r\n\r\n" + LIVE),
        post("Content-Length: 5\r\nContent-Length: 6", b"hello" + LIVE),
        post("Content-Length: +5", b"hello" + LIVE),
        post("Content-Length: 5 5", b"hello" + LIVE),
        post("Content-Length: 0x5", b"hello" + LIVE),
        post("Content-Length : 5", b"hello" + LIVE),
        post("Content-Length: 99999999999999999999999", b"hello" + LIVE),
        post("Transfer-Encoding: chunked, identity", b"0\r\n\r\n" + LIVE),
        post("Transfer-Encoding: xchunked", b"0\r\n\r\n" + LIVE),
        post("Transfer-Encoding: chunked", b"ffffffffffffffffff\r\n" + LIVE),
        post("Transfer-Encoding: chunked", b"-1\r\n" + LIVE),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + LIVE,  # TLS
        b"hello\r\n\r\n" + LIVE,
    ],
)
def test_what_can_be_read_in_two_ways_is_not_read(answers: Answers, odd: bytes) -> None:
    ((status, told, closes),) = answers(odd)
    assert (status, closes) == (400, True)
    assert told["error"].startswith("this is no request of HTTP/1.1 that can be read")


def test_who_is_answered_already_or_is_being_so_is_told_nothing_else(answers: Answers) -> None:
    assert answers(post("Refuse: yes\r\nTransfer-Encoding: chunked", b"zz\r\n"), ends=True) == [REFUSED]
    hello = post("Content-Length: 5", b"hello")
    assert answers(hello + b"no http", ends=True) == [(200, {"path": "/p", "body": "hello"}, True)]
    assert answers(hello * 3 + b"no http", ends=True)[:2] == [ECHOED, ECHOED]
    assert answers(hello + post("Transfer-Encoding: chunked", b"zz\r\n"), ends=True) == []


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([post("Content-Length: 5", b"hello")], [ECHOED]),
        ([post("Content-Length: 5", b"hello") * 3], [ECHOED] * 3),
        ([post("Transfer-Encoding: chunked", b"2\r\nhe\r\n3;a=b\r\nllo\r\n0\r\nTrailer: x\r\n\r\n")], [ECHOED]),
        ([post("Refuse: yes\r\nContent-Length: 5", b"he"), b"llo"], [REFUSED]),
        ([post("Refuse: yes\r\nContent-Length: 5", b"hello") * 3], [REFUSED] * 3),
        ([post("Refuse: yes\r\nTransfer-Encoding: chunked", b"5\r\nhello\r\n0\r\n\r\n")], [REFUSED]),
        (
            [post("Refuse: yes\r\nContent-Length: 5", b"hello") + post("Content-Length: 5", b"hello")],
            [REFUSED, ECHOED],
        ),
        (
            [post("Content-Length: 5", b"hello") + post("Refuse: yes\r\nContent-Length: 5", b"hello")],
            [ECHOED, ECHOED],  # it is behind another, so it is not refused on its headers
        ),
        ([post("Long: yes\r\nContent-Length: 5", b"hello") * 2], [ECHOED] * 2),  # asks, but not in short
        ([post("Long: yes\r\nRefuse: yes\r\nContent-Length: 5", b"hello")], [REFUSED]),
        ([post("Refuse: yes\r\nContent-Length: 40", LIVE)], [REFUSED]),  # what looks like a request is its body
    ],
)
def test_every_request_gets_one_answer_in_order(answers: Answers, asked: list[bytes], expected: list[Any]) -> None:
    body = b"x" * (40 - len(LIVE)) if b"Content-Length: 40" in asked[0] else b""
    assert answers(*asked, body) == [*expected, LAST]


@pytest.mark.parametrize(
    "last",
    [post("Refuse: yes\r\nContent-Length: 5", b"hello", "1.0")]
    + [
        post(f"Refuse: yes\r\nConnection: {how}\r\nContent-Length: 5", b"hello", version)
        for how, version in (("close", "1.1"), ("keep-alive", "1.0"))
    ],
)
def test_after_a_refusal_that_is_the_last_nothing_is_answered(answers: Answers, last: bytes) -> None:
    assert answers(last + LIVE) == [(429, {"error": "no"}, True)]


def test_a_head_without_end_is_refused_and_a_long_body_is_not_taken_for_one(answers: Answers) -> None:
    line = b"X-Long: " + b"x" * 1000 + b"\r\n"
    (found,) = answers(b"GET /p HTTP/1.1\r\nHost: here\r\n", *[line] * (MOST_HEAD // 500), ends=True)
    assert found == (
        431,
        {"error": f"the head of the request has more than {MOST_HEAD} bytes: that many are allowed"},
        True,
    )
    trailers = post("Transfer-Encoding: chunked", b"5\r\nhello\r\n0\r\n")
    (found,) = answers(trailers, *[line] * (MOST_HEAD // 500), ends=True)
    assert found[0] == 431
    size = 5 * MOST_HEAD
    (status, told, _), last = answers(
        post(f"Content-Length: {size}"), *[b"x" * 1000] * (size // 1000), b"x" * (size % 1000)
    )
    assert (status, len(told["body"]), last) == (200, size, LAST)


@pytest.mark.parametrize(
    "sent", [b"", b"GET /p HTTP/1.1\r\nHost: h", post("Content-Length: 6", b"hel"), LIVE + b"GET"], ids=len
)
def test_a_request_that_does_not_arrive_ends_the_connection(
    answers: Answers, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick_protocol, "ARRIVAL_S", 0.2)
    before = [(200, {"path": "/live", "body": ""}, False)] if sent.startswith(LIVE) else []
    late = [(408, {"error": "the request has not arrived within 0.2 s"}, True)] if sent else []
    assert answers(sent, ends=True) == before + late


def test_one_that_arrives_in_pieces_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quick_protocol, "ARRIVAL_S", 1.0)
    found = said(False, post("Content-Length: 5"), *(bytes([letter]) for letter in b"hello"), pause_s=0.4)
    assert found == [ECHOED, LAST]


def test_what_is_asked_in_short_is_answered_in_order_whatever_comes_of_it() -> None:
    def asked(body: bytes) -> bytes:
        return post(f"Content-Length: {len(body)}", body)

    wrong, hello = (400, {"error": "wrong"}, False), ECHOED
    assert said(True, asked(b"hello") + asked(b"wrong") + asked(b"hello")) == [
        hello,
        (200, {"path": "/p", "body": "wrong"}, False),
        hello,
        LAST,
    ]
    assert said(True, asked(b"wrong"), asked(b"wrong")) == [wrong, wrong, LAST]
    last = post("Connection: close\r\nContent-Length: 5", b"hello")
    assert said(True, last + asked(b"hello"), ends=True) == [(200, {"path": "/p", "body": "hello"}, True)]


def test_what_fails_in_the_server_is_told_and_printed(capfd: pytest.CaptureFixture[str]) -> None:
    found, last = said(True, post("Content-Length: 6", b"broken"))
    assert (found[0], found[1], last) == (500, {"error": "the server failed in this request"}, LAST)
    assert "ValueError: this is printed" in capfd.readouterr().err


@contextlib.asynccontextmanager
async def connected(
    app: Echo, most_unread: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, list[QuickProtocol]]]:
    """A connection to this application, and the server's side of it. `most_unread`: bytes that the kernel keeps in
    either direction for whoever does not read, twice or so."""
    config = uvicorn.Config(app, http=QuickProtocol, ws="none", lifespan="off", log_config=None)
    config.load()
    made: list[QuickProtocol] = []

    def make() -> QuickProtocol:
        made.append(QuickProtocol(config=config, server_state=ServerState(), app_state={}))
        return made[-1]

    listening, client = socket.create_server(("127.0.0.1", 0)), socket.socket()
    if most_unread is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, most_unread)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, most_unread)
    server = await asyncio.get_running_loop().create_server(make, sock=listening)
    client.connect(listening.getsockname())
    client.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=client)
    try:
        yield reader, writer, made
    finally:
        writer.close()
        server.close()


def test_a_client_that_goes_away_is_not_computed_for() -> None:
    async def talk() -> None:
        app = Echo(True)
        async with connected(app) as (_, writer, _):
            writer.write(post("Content-Length: 5", b"never"))
            while not app.begun:
                await asyncio.sleep(0.001)
            writer.close()
            while not app.noted:
                await asyncio.sleep(0.001)
            assert (app.begun[0].cancelled(), app.noted) == (True, [0])

    uvloop.run(asyncio.wait_for(talk(), LONG_S))


@pytest.mark.parametrize(
    "asked",
    [post("Content-Length: 5", b"wrong"), post("Refuse: yes\r\nContent-Length: 1", b"x")],
    ids=["answered", "refused"],
)
def test_a_client_that_reads_nothing_is_not_read_from_either(asked: bytes) -> None:
    count, most = 6000, 300_000  # answers of which would be more than twice as much

    async def talk() -> int:
        async with connected(Echo(True), 4096) as (reader, writer, made):
            writer.write(asked * (count - 1) + asked.replace(b"Host", b"Connection: close\r\nHost"))
            while not made or not made[0].flow.read_paused:
                kept = made[0].transport.get_write_buffer_size() if made else 0
                assert kept < most
                await asyncio.sleep(0)
            return (await reader.read()).count(b"HTTP/1.1 ")

    assert uvloop.run(asyncio.wait_for(talk(), LONG_S)) == count


def test_nothing_is_kept_of_what_was_answered_nor_of_a_connection_that_is_closed() -> None:
    async def until_gone(what: weakref.ref[Any]) -> None:
        while what() is not None:
            await asyncio.sleep(0.001)

    async def talk() -> None:
        app = Echo(True)
        async with connected(app) as (reader, writer, made):
            writer.write(post("Content-Length: 5", b"hello"))
            await reader.readuntil(b'"hello"}')
            answer = weakref.ref(app.begun.pop())
            await until_gone(answer)  # the connection goes on, and does not have it
            assert not writer.is_closing()
            connection = weakref.ref(made.pop())
            assert connection() is not None
            writer.close()
            await until_gone(connection)  # and no timer has that

    gc.disable()  # it would find things some day
    try:
        uvloop.run(asyncio.wait_for(talk(), 10.0))
    finally:
        gc.enable()
