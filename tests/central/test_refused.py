"""What is refused, late, damaged or only half there changes nothing: neither parameters nor who is a member."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from raw_frames import raw_frame
from servers_here import TOKEN, Running, running
from torch import nn

from paceline import __version__
from paceline.central.chief.tickets import Accepted, Close
from paceline.central.messages import replies, requests
from paceline.central.messages.settings import Settings
from paceline.central.shards import Shards, describe
from paceline.net.frames import Channel, ConnectionLost
from paceline.net.secure import proof_of
from paceline.rules import Sync

WEIGHT = 1000
SPEC = describe(
    [("weight", nn.Parameter(torch.zeros(WEIGHT)), 0)], torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 1
)
BYTES = Shards(SPEC).layouts[0].bytes


class Peer:
    """A process in the place of replica 0, or one that says so; it speaks byte by byte."""

    def __init__(self, server: Running, incarnation: int = 1, replica: int = 0) -> None:
        self.about: dict[str, Any] = {"container": "c", "replica": replica, "incarnation": incarnation}
        self.socket = server.connect()
        self._channel: Channel[replies.Reply] = Channel(self.socket, replies.REPLIES)
        self._channel.trusted = True
        challenge = self.ask(requests.Hello(version=__version__))
        self.ask(requests.Proof(proof=proof_of(TOKEN, challenge.nonce)))
        self._open = requests.Open(
            **self.about,
            spec=SPEC,
            settings=Settings(replicas=2, rule=Sync(), timeout_s=5.0),
            addresses=[server.address],
            server=0,
            machine="apart",
            checks=[],
        )

    def open(self) -> Peer:
        assert isinstance(self.ask(self._open), replies.Opened)
        return self

    def ask(self, request: Any, body: bytes = b"") -> Any:
        self.send(request, body)
        return self.answer()

    def send(self, request: Any, body: bytes = b"") -> None:
        self.socket.sendall(raw_frame(msgspec.msgpack.encode(request), body))

    def answer(self) -> Any:
        reply, _ = self._channel.receive(10)
        self._channel.skip_body(10)
        return reply

    def push(self, ticket: int, value: float) -> tuple[Any, bytes]:
        """The request, and its body: a gradient that is `value` everywhere."""
        return requests.Push(**self.about, ticket=ticket, wire="fp32"), torch.full((WEIGHT,), value).numpy().tobytes()

    def pulled(self) -> torch.Tensor:
        self.send(requests.Pull(container="c", replica=self.about["replica"], at_least=0, wire="fp32"))
        _, length = self._channel.receive(10)
        body = bytearray(length)
        self._channel.read_body(memoryview(body), 10)
        return torch.frombuffer(body, dtype=torch.float32)[:WEIGHT]

    def step(self, number: int, ticket: int) -> torch.Tensor:
        """What the parameters are after a step that was made of that ticket alone."""
        close = Close(number, 0, 4, 0.5, [Accepted(ticket, 0, 1.0, 4, 0, 0, [(0, 4)])])
        assert self.ask(requests.Apply(container="c", close=close, options=SPEC.optimizer.groups)) == replies.Done()
        return self.pulled()

    @property
    def is_connected(self) -> bool:
        """Whether the server still answers."""
        try:
            return isinstance(self.ask(requests.Containers()), replies.Listed)
        except (ConnectionLost, OSError):
            return False

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def server() -> Iterator[Running]:
    with running() as found:
        yield found


@pytest.fixture
def peers(server: Running) -> Iterator[Any]:
    """Makes peers, and closes them at the end."""
    with contextlib.ExitStack() as stack:

        def make(**given: int) -> Peer:
            return stack.enter_context(contextlib.closing(Peer(server, **given)))

        first = make().open()
        assert first.ask(requests.Fill(container="c"), bytes(BYTES)) == replies.Done()
        first.close()
        yield make


def refused(peer: Peer, request: Any, body: bytes) -> bool:
    """Whether a request is answered with a refusal, or the end of the connection."""
    try:
        return isinstance(peer.ask(request, body), replies.Refused)
    except (ConnectionLost, OSError):
        return True


def test_a_push_of_a_process_that_another_has_followed(peers: Any) -> None:
    old, new = peers(incarnation=1).open(), peers(incarnation=2).open()
    assert new.ask(*new.push(ticket=7, value=1.0)) == replies.Done()
    assert refused(old, *old.push(ticket=7, value=5.0))
    older = peers(incarnation=1)
    with pytest.raises(AssertionError):
        older.open()
    assert refused(older, *older.push(ticket=8, value=5.0))
    assert new.step(0, ticket=7).eq(-1.0).all()


def test_late_bytes_of_a_connection_that_another_has_followed(peers: Any) -> None:
    old = peers().open()
    request, body = old.push(ticket=7, value=5.0)
    sent = raw_frame(msgspec.msgpack.encode(request), body)
    old.socket.sendall(sent[: len(sent) // 2])
    time.sleep(0.1)  # they are being received
    new = peers().open()
    assert new.ask(*new.push(ticket=8, value=1.0)) == replies.Done()
    with contextlib.suppress(OSError):
        old.socket.sendall(sent[len(sent) // 2 :])
    with contextlib.suppress(ConnectionLost):
        old.answer()
    assert new.step(0, ticket=8).eq(-1.0).all()
    assert not old.is_connected


def test_a_ticket_that_is_over(peers: Any) -> None:
    peer = peers().open()
    assert peer.ask(*peer.push(ticket=8, value=1.0)) == replies.Done()
    assert peer.ask(*peer.push(ticket=8, value=1.0)) == replies.Done()  # its answer may have been lost
    assert "comes too late: that of 8 is here" in peer.ask(*peer.push(ticket=7, value=5.0)).sentence
    assert peer.step(0, ticket=8).eq(-1.0).all()


def test_a_replica_that_was_started_again_may_begin_further_back(peers: Any) -> None:
    old, new = peers(incarnation=1).open(), peers(incarnation=2)
    assert old.ask(*old.push(ticket=8, value=5.0)) == replies.Done()
    new.open()
    assert new.ask(*new.push(ticket=7, value=1.0)) == replies.Done()
    assert "comes too late: that of 7 is here" in new.ask(*new.push(ticket=6, value=5.0)).sentence
    assert new.step(0, ticket=7).eq(-1.0).all()


def test_a_push_without_a_place(peers: Any) -> None:
    peer, other = peers().open(), peers(replica=1)
    assert peer.ask(*peer.push(ticket=8, value=1.0)) == replies.Done()
    request, body = peer.push(ticket=9, value=5.0)
    assert "has another connection" in other.ask(request, body).sentence
    assert peer.step(0, ticket=8).eq(-1.0).all()


@pytest.mark.parametrize("place", [0, 2 * WEIGHT, 4 * WEIGHT - 1])
def test_a_gradient_that_was_damaged_on_the_way(server: Running, peers: Any, place: int) -> None:
    peer = peers().open()
    assert peer.ask(*peer.push(ticket=7, value=1.0)) == replies.Done()
    request, body = peer.push(ticket=8, value=1.0)
    sent = bytearray(raw_frame(msgspec.msgpack.encode(request), body))
    sent[place - len(body) - 8] ^= 4
    peer.socket.sendall(sent)
    with pytest.raises(ConnectionLost):
        peer.answer()
    assert server.said_soon("the body of a frame was damaged on the way")
    again = peers().open()
    assert again.step(0, ticket=7).eq(-1.0).all()  # what was there before is there
    assert again.ask(*again.push(ticket=8, value=1.0)) == replies.Done()
    assert again.step(1, ticket=8).eq(-2.0).all()


def test_half_a_gradient_and_rows_that_do_not_exist(peers: Any) -> None:
    peer = peers().open()
    assert peer.ask(*peer.push(ticket=7, value=1.0)) == replies.Done()
    request, body = peer.push(ticket=8, value=5.0)
    assert refused(peer, msgspec.structs.replace(request, untouched=[99]), body)
    assert peer.step(0, ticket=7).eq(-1.0).all()
    peer.socket.sendall(raw_frame(msgspec.msgpack.encode(request), body)[:2000])
    peer.socket.shutdown(socket.SHUT_WR)
    assert peers().open().pulled().eq(-1.0).all()


def test_a_newer_process_whose_connection_ends_first_leaves(server: Running, peers: Any) -> None:
    old = peers(incarnation=1).open()
    new = peers(incarnation=2).open()
    stays = peers(replica=1).open()
    members = lambda: stays.ask(requests.Describe(container="c")).members  # noqa: E731
    assert members() == [0, 1]
    new.close()
    end = time.monotonic() + 10
    while members() != [1]:  # though the one before it has not hung up
        assert time.monotonic() < end
        time.sleep(0.05)
    old.close()


def test_a_recorded_connection_is_of_no_use(server: Running) -> None:
    """The token does not travel, and a proof is good for one connection."""
    recorded: list[bytes] = []
    for _ in range(2):
        with server.connect() as connection:
            channel: Channel[replies.Reply] = Channel(connection, replies.REPLIES)
            connection.sendall(raw_frame(msgspec.msgpack.encode(requests.Hello(version=__version__))))
            challenge, _ = channel.receive(10)
            assert isinstance(challenge, replies.Challenge)
            proof = requests.Proof(proof=proof_of(TOKEN, challenge.nonce))
            recorded.append(raw_frame(msgspec.msgpack.encode(proof)))
            connection.sendall(recorded[0])
            reply, _ = channel.receive(10)
    assert isinstance(reply, replies.Refused)
    assert recorded[0] != recorded[1]
