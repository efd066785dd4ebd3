"""uvicorn's HTTP, which under load refuses a request on its headers: nobody reads its body, and no task is made of it.

A server that is asked ten times what it can answer says no nine times of ten. That has to cost next to nothing, or the
saying no is what keeps it from answering.

What is no HTTP, and a head without end, which httptools would keep in memory however long it is, end the connection
with a sentence.
"""

from __future__ import annotations

from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from paceline.serve.request_error import BAD, HEAD_TOO_LARGE

MOST_HEAD = 1 << 16  # bytes of a request that are not its body, but for those that arrive together with it
LINGER_S = 2.0  # who is told something while it sends would lose that if the connection were closed at once
_CLOSE = b"connection: close\r\n"


class RefusingProtocol(HttpToolsProtocol):
    """One connection, of an application with `refused(scope)`, which returns the answer of those that are."""

    _in_body = False  # the head of a request has arrived, and not all of it
    _refusing = False  # that request
    _closes = False  # after it
    _ended = False  # what arrives now is of no interest
    _head_bytes = 0  # since something was complete

    def data_received(self, data: bytes) -> None:
        """Takes what has arrived; nothing any more once the connection is to be closed."""
        if self._over:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MOST_HEAD and not self._over:
            self._end(HEAD_TOO_LARGE, f"the head of the request has more than {MOST_HEAD} bytes: that many are allowed")

    def on_headers_complete(self) -> None:
        """Refuses the request, or has it answered as any other."""
        self._head_bytes, self._in_body = 0, True
        if self._over:  # a request behind one after which the connection ends
            return
        in_turn = self.cycle is None or self.cycle.response_complete
        if in_turn and not self.expect_100_continue:  # who waits for that is not sending its body yet
            scope: Any = self.scope
            scope["method"], scope["path"] = self.parser.get_method().decode(), self.url.decode("latin1")
            refused = self.config.app.refused(scope)  # type: ignore[union-attr]
            if refused is not None:
                self._refusing = True
                self._closes = self.parser.get_http_version() == "1.0" or not self.parser.should_keep_alive()
                head = b"".join(b"%b: %b\r\n" % header for header in refused.raw_headers)
                head += _CLOSE if self._closes else b""
                self.transport.write(STATUS_LINE[refused.status_code] + head + b"\r\n" + refused.body)
                return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Takes a piece of the body; of a refused request it is let go."""
        self._head_bytes = 0
        if not self._refusing and not self._over:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the request, after which the next may come."""
        self._head_bytes, self._in_body = 0, False
        if not self._refusing:
            if not self._over:
                super().on_message_complete()
            return
        self._refusing = False
        if self._closes:
            self._linger()
        else:
            self.on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Tells that what has arrived is no HTTP, and closes the connection."""
        self._end(BAD, "this is no request of HTTP/1.1 that can be read: GET /docs shows what there is")

    def _end(self, status: int, sentence: str) -> None:
        """Tells this as the last, unless whoever sends this has a request that is answered already, or is being so."""
        cycle = self.cycle
        answered = cycle is None or cycle.response_complete
        if self._in_body and (self._refusing or answered):
            self._linger()
            return
        if not answered:
            if not self._in_body:  # what came before is answered, and is the last
                self._ended, cycle.keep_alive = True, False
                return
            cycle.disconnected = True  # nobody needs to compute it
            cycle.message_event.set()
            if self.pipeline:
                self.transport.close()
                return
        body = msgspec.json.encode({"error": sentence})
        head = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + _CLOSE + b"\r\n" + body)
        self._linger()

    def _linger(self) -> None:
        """Says that there will be no more, and closes the connection when the client has, or soon."""
        self._ended = True
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    @property
    def _over(self) -> bool:
        return self._ended or self.transport.is_closing()
