"""Asks a server over HTTP, from one thread and many connections; prints what came back, by status, with its seconds.

ask_http.py PORT CLIENTS SECONDS [RATE]: each client asks again when it has its answer; or, with a rate, so many
requests a second are begun however long answers take, and those that find no free connection are counted, not sent.

It shares the cores with the server that it asks, so it is as cheap as it can be: no futures, no tasks, one write and
one read a request; and it is let in soon when an answer is there, else its own waiting would be counted as the
server's. One client alone is a plain socket.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable

import uvloop

from paceline.serve.short_slice import SHORTEST_NS, run_in_slices

LOST = 0  # a status that no server gives


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


class Connection(asyncio.Protocol):
    def __init__(self, answered: Callable[[Connection, int, float], None]) -> None:
        self._answered, self._reply, self._began = answered, Reply(), 0.0

    def connection_made(self, transport) -> None:
        self._transport = transport

    def ask(self) -> None:
        self._began = time.perf_counter()
        self._transport.write(REQUEST)

    def data_received(self, data: bytes) -> None:
        if (status := self._reply.take(data)) is not None:
            self._answered(self, status, time.perf_counter() - self._began)

    def connection_lost(self, error) -> None:
        self._answered(self, LOST, 0.0)


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


async def many(port: int, clients: int, seconds: float, rate: float | None) -> tuple[list[tuple[int, float]], int]:
    loop, found, unsent, free = asyncio.get_running_loop(), [], 0, []
    end = float("inf")

    def answered(connection: Connection, status: int, took: float) -> None:
        if end == float("inf") or (status == LOST and time.perf_counter() > end):
            return
        if connection in free:  # nothing was asked on it, and the server closes what is idle
            free.remove(connection)
            return
        found.append((status, took))
        if status == LOST:
            return
        if rate is None and time.perf_counter() < end:
            connection.ask()
        else:
            free.append(connection)

    connections = [
        (await loop.create_connection(lambda: Connection(answered), "127.0.0.1", port))[1] for _ in range(clients)
    ]
    began = time.perf_counter()
    end = began + seconds
    if rate is None:
        for connection in connections:
            connection.ask()
        await asyncio.sleep(seconds)
    else:
        sent, free = 0, list(connections)
        while (now := time.perf_counter()) < end:
            while sent < (now - began) * rate:
                sent += 1
                if free:
                    free.pop(0).ask()  # all in turn, so that none is idle for long
                else:
                    unsent += 1
            await asyncio.sleep(0.0005)
    while len(free) < len(connections) and time.perf_counter() < end + 10:  # what was begun is waited for
        await asyncio.sleep(0.001)
    return found, unsent


def main(port: int, clients: int, seconds: float, rate: float | None) -> None:
    run_in_slices(SHORTEST_NS)
    began = time.perf_counter()
    if clients == 1 and rate is None:
        found, unsent = one_after_the_other(port, seconds), 0
    else:
        found, unsent = uvloop.run(many(port, clients, seconds, rate))
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
