"""Where supervisors of several hosts meet: whoever is no host of the run does not keep those away that are."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from paceline.errors import LaunchError, SecurityError
from paceline.launch import meeting as meeting_module
from paceline.launch import meeting_door as door_module
from paceline.launch.host_greeting import greet, hear
from paceline.launch.host_messages import (
    HOST_MESSAGES,
    HostComes,
    HostLost,
    HostReady,
    RunBegins,
    RunFailed,
    RunRefused,
    StopAsked,
    ViewProposed,
)
from paceline.launch.meeting import Meeting
from paceline.launch.meeting_door import HostsSetting
from paceline.net import strangers as strangers_module
from paceline.net.frames import Channel

Answer = TypeVar("Answer")


def setting(
    host: int, port: int, *, hosts: int = 2, fewest: int | None = None, lost_after_s: float = 20.0, flag: str = ""
) -> HostsSetting:
    return HostsSetting(
        host=host,
        hosts=hosts,
        rendezvous=f"127.0.0.1:{port}",
        token="secret",
        keys=None,
        settings={"wire": flag},
        timeout_s=20.0,
        lost_after_s=lost_after_s,
        fewest=fewest,
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
    begins = RunBegins(container="c", addresses=list(addresses), hosts=[0, 1])
    assert [soon(ask) for ask in asked] == [begins, begins]


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("limit", ["MOST_STRANGERS", "MOST_OF_ONE_ADDRESS"])
def test_strangers_who_say_nothing_keep_no_host_away(port: int, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers_module, limit, 3)
    monkeypatch.setattr(door_module, "HANDSHAKE_S", 300.0)  # so long a stranger could stay
    monkeypatch.setattr(hear, "__defaults__", (300.0,))
    with contextlib.ExitStack() as stack:
        said: list[str] = []
        host = stack.enter_context(contextlib.closing(Meeting(setting(0, port), said.append)))
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30)) for _ in range(70)]
        guest = stack.enter_context(contextlib.closing(Meeting(setting(1, port), said.append)))
        both_begin(host, guest)
        assert idle[0].recv(1) == b""  # the oldest made room


def test_what_a_stranger_says_is_not_printed(port: int) -> None:
    said: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(Meeting(setting(0, port), said.append)))
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        Channel(connection, HOST_MESSAGES, most_body_bytes=0).send(RunRefused(sentence="\x1b[2Jtype your password"))
        soon(lambda: said or None)
    assert said == ["turned away whoever came from 127.0.0.1: RunRefused has come and not HostGreeting"]


def test_who_refuses_a_host_and_has_proven_nothing_is_quoted_on_one_line_of_letters() -> None:
    with contextlib.ExitStack() as stack:
        guest, stranger = (
            Channel(stack.enter_context(one), HOST_MESSAGES, most_body_bytes=0) for one in socket.socketpair()
        )
        stranger.send(RunRefused(sentence="\x1b[2J\n" + 2000 * "a"))
        with pytest.raises(SecurityError) as refused:
            greet(guest, "secret")
    assert str(refused.value) == r"\x1b[2J\n" + 995 * "a"


def test_a_host_that_waits_for_something_else_is_not_silent(port: int) -> None:
    """For torch, say, which one loads sooner than another."""
    host, guest = (Meeting(setting(number, port, lost_after_s=0.5), print) for number in (0, 1))
    with contextlib.closing(host), contextlib.closing(guest):
        both_begin(host, guest)
        end, heard = time.monotonic() + 1.5, []
        while time.monotonic() < end:
            host.speak()
            heard += guest.news()
            time.sleep(0.01)
        assert not heard


def test_a_host_that_does_not_hear_the_first_does_not_end_it(port: int) -> None:
    """What it sends still arrives: that it has lost host 0 is its own end, and nobody else's."""
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(contextlib.closing(Meeting(setting(0, port), print)))
        guest = stack.enter_context(contextlib.closing(Meeting(setting(1, port, lost_after_s=0.3), print)))
        both_begin(host, guest)
        lost = HostLost(host=0, why="it has been silent for 0.3 s")
        assert soon(lambda: [one for one in guest.news() if one == lost] or None)
        guest.tell_first(StopAsked(code=130, by="SIGINT"))  # if that has come, so has all before it
        heard = soon(lambda: host.news() or None)
        assert [one for one in heard if isinstance(one, HostLost) and one.host == 0] == []


@pytest.fixture
def begun(port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Meeting, Callable[..., Meeting]]]:
    """A run that has begun with host 0 alone, of up to three, and how another comes."""
    monkeypatch.setattr(meeting_module, "MOMENT_S", 0.0)
    with contextlib.ExitStack() as stack:

        def come(host: int, **given: Any) -> Meeting:
            own = setting(host, port, hosts=3, fewest=1, **given)
            return stack.enter_context(contextlib.closing(Meeting(own, print)))

        host = come(0)
        assert soon(host.gather({}, "")) == RunBegins(container="", addresses=[], hosts=[0])
        yield host, come


def test_a_host_that_comes_later_waits_outside_where_nobody_waits_for_it(
    begun: tuple[Meeting, Callable[..., Meeting]],
) -> None:
    host, come = begun
    guest = come(2)
    soon(guest.address)
    begins = guest.gather({}, "")
    assert [one.host for one in soon(lambda: host.news() or None) if isinstance(one, HostComes)] == [2]
    assert soon(begins) == RunBegins(container="", addresses=[], hosts=[0], joins=True)
    guest.tell(RunFailed(host=2, code=1, sentence="it has failed"))
    guest.tell(StopAsked(code=130, by="SIGINT"))
    ready = HostReady(host=2, rows=[0], trainer=1, model=7)
    guest.tell_first(ready)
    assert soon(lambda: host.news() or None) == [ready]  # and nothing of what happened there before
    host.finish(0, trained=True)
    assert host.code == 0  # though the other has not finished


def test_a_host_that_was_let_in_is_waited_for(begun: tuple[Meeting, Callable[..., Meeting]]) -> None:
    host, come = begun
    guest = come(1)
    soon(guest.address)
    begins = guest.gather({}, "")
    soon(lambda: host.news() or None)
    soon(begins)
    host.tell(ViewProposed(number=2, rows={0: [0], 1: [0]}))
    host.finish(0, trained=True)
    assert host.code is None
    guest.finish(0, trained=True)
    soon(lambda: host.news() or host.code is not None or None)
    assert host.code == 0


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"flag": "bf16"}, "wire is 'bf16': that is host 1's, and host 0 has '', give every host the same"),
        ({}, "node-rank is 1: another host has it, give this one its own"),
    ],
)
def test_who_cannot_join_is_told_why_and_nobody_else_is(
    begun: tuple[Meeting, Callable[..., Meeting]], given: dict[str, str], sentence: str
) -> None:
    host, come = begun
    host._late._lost_after_s = 0.2  # so long it may be that the one before has gone without a word
    first, second = come(1), come(1, **given)
    soon(first.address)
    first.gather({}, "")
    soon(lambda: host.news() or None)
    soon(second.address)
    begins = second.gather({}, "")
    heard: list[object] = []

    def answer() -> str | None:
        heard.extend(host.news())
        try:
            begins()
        except LaunchError as error:
            return str(error)
        return None

    assert soon(answer) == sentence
    assert heard == []


def test_a_host_that_is_gone_before_the_run_begins_may_come_again(port: int) -> None:
    with contextlib.ExitStack() as stack:

        def come(host: int) -> Meeting:
            own = setting(host, port, fewest=2)
            return stack.enter_context(contextlib.closing(Meeting(own, print)))

        host, first = come(0), come(1)
        begins = host.gather({}, "")
        soon(first.address)
        first.gather({}, "")
        first.close()
        second = come(1)
        soon(second.address)
        second.gather({}, "")
        assert soon(begins) == RunBegins(container="", addresses=[], hosts=[0, 1])
