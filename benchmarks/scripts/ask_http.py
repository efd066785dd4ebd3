"""Asks a server over HTTP, from one thread and many connections; prints what came back, by status, with its seconds.

ask_http.py PORT CLIENTS SECONDS [RATE]: each client asks again when it has its answer; or, with a rate, so many
requests a second are begun however long answers take, and those that find no free connection are counted, not sent.
"""

import asyncio
import json
import sys
import time

import uvloop

BODY = json.dumps([0.5] * 256).encode()
HEAD = f"POST /predict HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
REQUEST = HEAD.encode() + BODY


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._data, self._answer = b"", None

    def connection_made(self, transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if found:
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            if len(body) >= length:
                self._data = b""
                self._answer.set_result(int(head.split(b" ", 2)[1]))

    def connection_lost(self, error) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(0)  # a status that no server gives

    async def ask(self) -> tuple[int, float]:
        began = time.perf_counter()
        self._answer = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            return 0, 0.0
        self._transport.write(REQUEST)
        return await self._answer, time.perf_counter() - began


async def main(port: int, clients: int, seconds: float, rate: float | None) -> None:
    loop, found, unsent = asyncio.get_running_loop(), [], 0
    connections = [(await loop.create_connection(Connection, "127.0.0.1", port))[1] for _ in range(clients)]
    for connection in connections:
        await connection.ask()
    began = time.perf_counter()
    end = began + seconds

    async def again(connection: Connection) -> None:
        while time.perf_counter() < end:
            found.append(await connection.ask())

    async def once(connection: Connection) -> None:
        found.append(await connection.ask())
        connections.append(connection)

    if rate is None:
        await asyncio.gather(*map(again, connections))
    else:
        sent, asking = 0, set()
        while (now := time.perf_counter()) < end:
            while sent < (now - began) * rate:
                sent += 1
                if connections:
                    task = loop.create_task(once(connections.pop()))
                    asking.add(task)
                    task.add_done_callback(asking.discard)
                else:
                    unsent += 1
            await asyncio.sleep(0.001)
        await asyncio.gather(*asking)
    took = time.perf_counter() - began
    by_status = {}
    for status, one in found:
        by_status.setdefault(status, []).append(one)
    told = {str(status): sorted(times) for status, times in by_status.items()}
    print(json.dumps({"seconds": took, "unsent": unsent, "by_status": told}))


port, clients, seconds, *rate = sys.argv[1:]
uvloop.run(main(int(port), int(clients), float(seconds), float(rate[0]) if rate else None))
