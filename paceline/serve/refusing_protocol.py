"""uvicorn's HTTP, which under load refuses a request on its headers: nobody reads its body, and no task is made of it.

A server that is asked ten times what it can answer says no nine times of ten. That has to cost next to nothing, or the
saying no is what keeps it from answering.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol


class RefusingProtocol(HttpToolsProtocol):
    """One connection, of an application with `refused(scope)`, which returns the answer of those that are."""

    _refusing = False  # the request whose body is arriving

    def on_headers_complete(self) -> None:
        """Refuses the request, or has it answered as any other."""
        in_turn = self.cycle is None or self.cycle.response_complete
        if in_turn and not self.expect_100_continue:  # who waits for that is not sending its body yet
            scope: Any = self.scope
            scope["method"], scope["path"] = self.parser.get_method().decode(), self.url.decode("latin1")
            refused = self.config.app.refused(scope)  # type: ignore[union-attr]
            if refused is not None:
                self._refusing = True
                head = b"".join(b"%b: %b\r\n" % header for header in refused.raw_headers)
                self.transport.write(STATUS_LINE[refused.status_code] + head + b"\r\n" + refused.body)
                return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Takes a piece of the body; of a refused request it is let go."""
        if not self._refusing:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the request, after which the next may come."""
        if not self._refusing:
            super().on_message_complete()
            return
        self._refusing = False
        if self.parser.should_keep_alive():
            self.on_response_complete()
        else:
            self.transport.close()
