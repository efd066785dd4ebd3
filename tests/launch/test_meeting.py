"""Where supervisors of several hosts meet: whoever is no host of the run does not keep those away that are."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from paceline.launch import meeting as meeting_module
from paceline.launch.host_greeting import hear
from paceline.launch.host_messages import RunBegins
from paceline.launch.meeting import HostsSetting, Meeting
from paceline.net import strangers as strangers_module

Answer = TypeVar("Answer")


def setting(host: int, port: int) -> HostsSetting:
    return HostsSetting(
        host=host,
        hosts=2,
        rendezvous=f"127.0.0.1:{port}",
        token="secret",
        keys=None,
        settings={},
        timeout_s=20.0,
        lost_after_s=20.0,
    )


def soon(ask: Callable[[], Answer | None]) -> Answer:
    end = time.monotonic() + 30
    while (answer := ask()) is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    return answer


def both_begin(host: Meeting, guest: Meeting) -> None:
    """All that host and guest say to each other before a run begins."""
    addresses = soon(host.address), soon(guest.address)
    asked = host.gather({0: addresses[0]}, "c"), guest.gather({1: addresses[1]}, "")
    begins = RunBegins(container="c", addresses=list(addresses))
    assert [soon(ask) for ask in asked] == [begins, begins]


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("limit", ["MOST_STRANGERS", "MOST_OF_ONE_ADDRESS"])
def test_strangers_who_say_nothing_keep_no_host_away(port: int, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers_module, limit, 3)
    monkeypatch.setattr(meeting_module, "HANDSHAKE_S", 300.0)  # so long a stranger could stay
    monkeypatch.setattr(hear, "__defaults__", (300.0,))
    with contextlib.ExitStack() as stack:
        said: list[str] = []
        host = stack.enter_context(contextlib.closing(Meeting(setting(0, port), said.append)))
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(70)]
        guest = stack.enter_context(contextlib.closing(Meeting(setting(1, port), said.append)))
        both_begin(host, guest)
        assert idle[0].recv(1) == b""  # the oldest made room
