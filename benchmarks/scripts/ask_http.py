"""Asks a server over HTTP, from one thread and many connections; prints what came back, by status, with its seconds.

ask_http.py PORT CLIENTS SECONDS [RATE]: each client asks again when it has its answer; or, with a rate, so many
requests a second are begun however long answers take, and those that find no free connection are counted, not sent.

It shares the cores with the server that it asks, so it is as cheap as it can be: no loop of events but its own, one
write and one read a request, no garbage to look for. It is let in soon when an answer is there, else its own waiting
would be counted as the server's. One client alone is a plain socket.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import select
import socket
import struct
import sys
import time
from collections import deque

from paceline.serve.short_slice import SHORTEST_NS, run_in_slices

LOST = 0  # a status that no server gives
LONGEST_WAIT_S = 0.001  # for answers, before it is looked whether a request is due


def made_request() -> bytes:
    """A row of 256 numbers in JSON; or with `ASKED_SHAPE` a tensor of that shape, as bytes, to the protocol's model."""
    path, body, more = "/predict", json.dumps([0.5] * 256).encode(), ""
    if "ASKED_SHAPE" in os.environ:
        shape = json.loads(os.environ["ASKED_SHAPE"])
        data = struct.pack("<f", 0.5) * math.prod(shape)
        tensor = {"name": "input", "shape": shape, "datatype": "FP32", "parameters": {"binary_data_size": len(data)}}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        path, body = "/v2/models/model/infer", head + data
        more = f"Inference-Header-Content-Length: {len(head)}\r\n"
    kind = "application/octet-stream" if more else "application/json"
    head = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Type: {kind}\r\n{more}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


REQUEST = made_request()


class Reply:
    """The bytes of one answer as they come."""

    def __init__(self) -> None:
        self._data = b""

    def take(self, data: bytes) -> int | None:
        """Returns the status when all of it is there."""
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if not found:
            return None
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            if not body.endswith(b"0\r\n\r\n"):
                return None
        elif len(body) < int(lower.partition(b"\r\ncontent-length:")[2].split(b"\r\n", 1)[0]):
            return None
        self._data = b""
        return int(head.split(b" ", 2)[1])


class Connection:
    """One of many: at most one request is under way on it."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_asked, self._reply, self._began = False, Reply(), 0.0

    def ask(self) -> None:
        self.is_asked, self._began = True, time.perf_counter()
        with contextlib.suppress(OSError):  # the server has closed it: that is read next
            self.socket.sendall(REQUEST)

    def read(self) -> tuple[int, float] | None:
        """Something is there to be read. Returns status and seconds when it is all of the answer."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        status = self._reply.take(data) if data else LOST
        return None if status is None else (status, time.perf_counter() - self._began)


def one_after_the_other(port: int, seconds: float) -> list[tuple[int, float]]:
    """One client, which does nothing but wait for its answer."""
    found, reply = [], Reply()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            connection.sendall(REQUEST)
            while (status := reply.take(connection.recv(1 << 20))) is None:
                pass
            found.append((status, time.perf_counter() - began))
    return found


def many(port: int, clients: int, seconds: float, rate: float | None) -> tuple[list[tuple[int, float]], int]:
    """Returns answers and their seconds, and how many requests were due when no connection was free."""
    connections = [Connection(port) for _ in range(clients)]
    by_descriptor, events = {connection.socket.fileno(): connection for connection in connections}, select.epoll()
    for descriptor in by_descriptor:
        events.register(descriptor, select.EPOLLIN)
    found, free, sent, unsent = [], deque(connections), 0, 0  # all in turn, so that none is idle for long
    began = time.perf_counter()
    end = began + seconds
    while (now := time.perf_counter()) < end or (len(free) < len(by_descriptor) and now < end + 10):
        due = len(free) if rate is None else int((now - began) * rate) - sent
        for _ in range(due if now < end else 0):
            sent += 1
            if free:
                free.popleft().ask()
            else:
                unsent += 1
        for descriptor, _ in events.poll(LONGEST_WAIT_S):
            connection = by_descriptor[descriptor]
            if (answer := connection.read()) is None:
                continue
            if connection.is_asked:
                found.append(answer)
            if answer[0] == LOST:
                events.unregister(descriptor)
                del by_descriptor[descriptor]
                if not connection.is_asked:
                    free.remove(connection)  # the server closes what is idle
            else:
                connection.is_asked = False
                free.append(connection)
    return found, unsent


def main(port: int, clients: int, seconds: float, rate: float | None) -> None:
    run_in_slices(SHORTEST_NS)
    gc.disable()
    began = time.perf_counter()
    if clients == 1 and rate is None:
        found, unsent = one_after_the_other(port, seconds), 0
    else:
        found, unsent = many(port, clients, seconds, rate)
    by_status = {}
    for status, one in found:
        by_status.setdefault(status, []).append(one)
    told = {str(status): sorted(times) for status, times in by_status.items()}
    said = json.dumps({"seconds": time.perf_counter() - began, "unsent": unsent, "by_status": told}).encode()
    os.set_blocking(1, True)  # whatever the loop has made of it: a pipe takes 64 KB at a time
    while said:
        said = said[os.write(1, said) :]


if __name__ == "__main__":
    port, clients, seconds, *rate = sys.argv[1:]
    main(int(port), int(clients), float(seconds), float(rate[0]) if rate else None)
