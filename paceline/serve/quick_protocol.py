"""uvicorn's HTTP, with a short way for what is asked all the time, and a shorter one for what is refused.

    head ─┬─ refused: told so on its headers; nobody reads its body, and no task is made of it
          ├─ a request to the model that arrives in one piece: begun and answered here, written at once
          └─ anything else: a task, ASGI, routes

A server that is asked ten times what it can answer says no nine times of ten. That has to cost next to nothing, or the
saying no is what keeps it from answering. And of a model that answers in a fraction of a millisecond, tasks and routes
would take as long again.

What is no HTTP, a head without end, which httptools would keep in memory however long it is, and a request that does
not arrive end the connection with a sentence.
"""

from __future__ import annotations

import time
import traceback
from asyncio import Future, TimerHandle
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from paceline.serve.http_request import HttpRequest
from paceline.serve.request_error import BAD, HEAD_TOO_LARGE, TOO_SLOW

MOST_HEAD = 1 << 16  # bytes of a request that are not its body, but for those that arrive together with it
ARRIVAL_S = 30.0  # for a head to arrive, and for the next piece of a body
LINGER_S = 2.0  # who is told something while it sends would lose that if the connection were closed at once
_CLOSE = b"connection: close\r\n"


class QuickProtocol(HttpToolsProtocol):
    """One connection, of an application that has `is_asking`, `refused`, `is_short`, `begin`, `finish` and `note`."""

    _in_head = False  # a request has begun to arrive
    _in_body = False  # the head of a request has arrived, and not all of it
    _refusing = False  # that request
    _asking: HttpRequest | None = None  # that request, if it may go the short way
    _pieces: list[bytes]  # of its body
    _timer: TimerHandle | None = None  # that ends the connection, or looks whether to
    _keeps_alive = True  # the connection, after that request
    _ended = False  # what arrives now is of no interest
    _head_bytes = 0  # since something was complete

    _awaited_since: float | None = None  # the rest of a head, or the next piece of a body

    # ── what arrives ─────────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: Any) -> None:
        """Takes a connection, of which a request is expected."""
        super().connection_made(transport)
        self._awaited_since = self.loop.time()
        self._timer = self.loop.call_later(ARRIVAL_S, self._look_whether_it_arrives)

    def connection_lost(self, exc: Exception | None) -> None:
        """Lets go of everything: a timer would hold the connection, and its last request, for as long as it runs."""
        super().connection_lost(exc)
        for timer in (self._timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        self._asking, self._pieces, self._timer, self.timeout_keep_alive_task = None, [], None, None
        nobody: Any = None
        self.cycle = nobody
        self.pipeline.clear()

    def _look_whether_it_arrives(self) -> None:
        """Ends the connection if what is awaited has not come; looks once in so many seconds, so that a request costs
        no more than a look at the clock."""
        if self._over:
            return
        since, now = self._awaited_since, self.loop.time()
        if since is None or self.flow.read_paused:  # nothing is, or it is this side that does not read
            since = now
        if now - since < ARRIVAL_S:
            self._timer = self.loop.call_later(since + ARRIVAL_S - now, self._look_whether_it_arrives)
        elif self._in_head or self._in_body:
            self._end(TOO_SLOW, f"the request has not arrived within {ARRIVAL_S:g} s")
        else:
            self.transport.close()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._in_head, self._awaited_since = True, self.loop.time()
        super().on_message_begin()

    def data_received(self, data: bytes) -> None:
        """Takes what has arrived; nothing any more once the connection is to be closed."""
        if self._over:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._asking is not None:  # its body comes in pieces: the usual way
            self._asking = None
            super().on_headers_complete()
            for piece in self._pieces:
                super().on_body(piece)
            self._pieces = []
        if self._head_bytes > MOST_HEAD and not self._over:
            self._end(HEAD_TOO_LARGE, f"the head of the request has more than {MOST_HEAD} bytes: that many are allowed")

    def on_headers_complete(self) -> None:
        """Refuses the request, or has it answered in short, or as any other."""
        self._head_bytes, self._awaited_since = 0, self.loop.time()
        self._in_head, self._in_body = False, True
        if self._over:  # a request behind one after which the connection ends
            return
        in_turn = self.cycle is None or self.cycle.response_complete
        # who waits for a 100 is not sending its body yet; who does not read what it is told is told it by a task, that
        # waits until it does, and meanwhile nothing of it is read
        if in_turn and not self.flow.write_paused and not self.expect_100_continue:
            scope: Any = self.scope
            scope["method"], scope["path"] = self.parser.get_method().decode(), self.url.decode("latin1")
            app: Any = self.config.app
            if app.is_asking(request := HttpRequest(scope)):
                self._keeps_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
                refused = app.refused(request)
                if refused is not None:
                    self._refusing = True
                    self._write(refused, self._keeps_alive)
                    return
                if app.is_short(request):
                    self._asking, self._pieces = request, []
                    return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Takes a piece of the body; of a refused request it is let go."""
        self._head_bytes, self._awaited_since = 0, self.loop.time()
        if self._asking is not None:
            self._pieces.append(body)
        elif not self._refusing and not self._over:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the request, after which the next may come."""
        self._head_bytes, self._in_body, self._awaited_since = 0, False, None
        if self._refusing:
            self._refusing = False
            if self._keeps_alive:
                self.on_response_complete()
            else:
                self._linger()
        elif self._asking is not None:
            request, self._asking = self._asking, None
            body, self._pieces = b"".join(self._pieces), []
            self._begin(request, body)
        elif not self._over:
            super().on_message_complete()

    # ── the short way ────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, request: HttpRequest, body: bytes) -> None:
        cycle: Any = _QuickCycle(self._keeps_alive)
        self.cycle = cycle
        app: Any = self.config.app
        try:
            begun = app.begin(request, body)
        except Exception:
            begun = _broken()
        if isinstance(begun, Response):
            self._finish(request, cycle, begun)
            return
        cycle.future = begun.future
        begun.future.add_done_callback(partial(self._answered, request, cycle, begun))

    def _answered(self, request: HttpRequest, cycle: _QuickCycle, begun: Any, future: Future[Any]) -> None:
        app: Any = self.config.app
        if cycle.disconnected or future.cancelled():
            app.note(request.scope, 0, time.perf_counter() - cycle.began, 0)
            if not self.transport.is_closing():  # somebody has given up, and it was not the client
                self.transport.close()
            return
        try:
            response = app.finish(request, begun)
        except Exception:
            response = _broken()
        self._finish(request, cycle, response)

    def _finish(self, request: HttpRequest, cycle: _QuickCycle, response: Response) -> None:
        cycle.response_complete, cycle.future = True, None  # the answer is not kept until the next request
        self._write(response, cycle.keep_alive)
        app: Any = self.config.app
        app.note(request.scope, response.status_code, time.perf_counter() - cycle.began, len(response.body))
        if cycle.keep_alive:
            self.on_response_complete()
        else:
            self._linger()

    def _write(self, response: Response, keeps_alive: bool) -> None:
        """Writes an answer in one go: head and body by themselves would be two packets, and wake the client twice."""
        head = [STATUS_LINE[response.status_code]]
        for name, value in (*self.server_state.default_headers, *response.raw_headers):
            head += (name, b": ", value, b"\r\n")
        head += (b"" if keeps_alive else _CLOSE, b"\r\n", bytes(response.body))
        self.transport.write(b"".join(head))

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────

    def send_400_response(self, msg: str) -> None:
        """Tells that what has arrived is no HTTP, and closes the connection."""
        self._end(BAD, "this is no request of HTTP/1.1 that can be read: GET /docs shows what there is")

    def _end(self, status: int, sentence: str) -> None:
        """Tells this as the last, unless whoever sends this has a request that is answered already, or is being so."""
        cycle = self.cycle
        answered = cycle is None or cycle.response_complete
        if self._refusing or (self._in_body and answered and self._asking is None):
            self._linger()
            return
        self._asking = None
        if not answered:
            if not self._in_body:  # what came before is answered, and is the last
                self._ended, cycle.keep_alive = True, False
                return
            cycle.disconnected = True  # nobody needs to compute it
            cycle.message_event.set()
            if self.pipeline:
                self.transport.close()
                return
        self._write(Response(msgspec.json.encode({"error": sentence}), status, media_type="application/json"), False)
        self._linger()

    def _linger(self) -> None:
        """Says that there will be no more, and closes the connection when the client has, or soon."""
        self._ended = True
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(LINGER_S, self.transport.close)

    @property
    def _over(self) -> bool:
        return self._ended or self.transport.is_closing()


class _QuickCycle:
    """A request on the short way, as uvicorn sees it: that looks whether it is answered, has the connection closed
    after it, and says when the client has gone."""

    more_body = False

    def __init__(self, keep_alive: bool) -> None:
        self.keep_alive, self.began = keep_alive, time.perf_counter()
        self.response_complete = self.disconnected = False
        self.future: Future[Any] | None = None

    @property
    def message_event(self) -> _QuickCycle:
        """Returns what is told when something happens: itself."""
        return self

    def set(self) -> None:
        """Something has happened to the connection."""
        if self.disconnected and self.future is not None:
            self.future.cancel()


def _broken() -> Response:
    """Returns the answer to what should not have happened, which is printed."""
    traceback.print_exc()
    return Response(b'{"error":"the server failed in this request"}', 500, media_type="application/json")
