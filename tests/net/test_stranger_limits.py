"""Whoever connects is served by a thread of its own; a crowd that uses up what a process may have costs no more."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from paceline.net.strangers import Strangers, accept_all


@contextlib.contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Inside, this process can have so many more files open."""
    lowest = os.dup(0)
    os.close(lowest)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("room", [0, 1], ids=["not even accepted", "accepted, and no more"])
def test_a_moment_without_free_files_costs_no_more_than_a_connection(room: int) -> None:
    said: list[str] = []
    ended, strangers = threading.Event(), Strangers()

    def serve(connection: socket.socket, address: str) -> None:
        strangers.remove(connection)
        with connection:
            connection.sendall(address.encode())

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as first, socket.socket() as second:
        first.connect(listener.getsockname())
        how = (listener, strangers, serve, ended, said.append)
        thread = threading.Thread(target=accept_all, args=how, daemon=True)
        try:
            with free_descriptors(room):  # a file for the connection, and one for the hand on it
                thread.start()
                end = time.monotonic() + 30
                while not said and time.monotonic() < end:
                    time.sleep(0.01)
            assert said[:1] == ["a connection could not be accepted (Too many open files)"]
            second.connect(listener.getsockname())
            second.settimeout(30)
            assert second.recv(100).decode() == "{}:{}".format(*second.getsockname())
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(30)
        assert not thread.is_alive()
