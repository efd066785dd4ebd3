"""How two supervisors find out that they are of one run: both prove that they know its token.

    host 1 ──HostGreeting──▶ host 0 ──HostQuestion──▶ host 1 ──HostProof──▶ host 0 ──HostWelcome──▶ host 1

Neither sends the token. The proofs are hashes of both sides' numbers, each never used before, and of who says it: what
somebody has recorded, or has heard from one side, is of no use at the other, nor at a server, whose proofs are of
something else (`central/server/welcome.py`). Whoever comes proves it first, so a stranger is told nothing.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from typing import TypeVar

from paceline import __version__
from paceline.errors import PacelineError, SecurityError
from paceline.launch.host_messages import (
    HostGreeting,
    HostMessage,
    HostProof,
    HostQuestion,
    HostWelcome,
    RunRefused,
)
from paceline.net.frames import Channel, FrameError, printable
from paceline.net.secure import HANDSHAKE_S, proof_of, same_proof

NONCE_BYTES = 32
MOST_QUOTED = 100
MOST_OF_A_REFUSAL = 1000  # letters

Said = TypeVar("Said", bound=HostMessage)


class OtherVersion(SecurityError):
    """A host of this run has another version, so nobody can go on."""


def proof_by(who: str, token: str, theirs: bytes, own: bytes) -> bytes:
    """What `who`, "host 0" or "guest", makes of the other side's number and its own.

    >>> proof_by("guest", "secret", b"1", b"2") == proof_by("host 0", "secret", b"1", b"2")
    False
    """
    return proof_of(token, who.encode() + b"\0" + theirs + own)


def greet(channel: Channel[HostMessage], token: str) -> None:
    """Be let in by host 0, if it knows the token as well."""
    own = secrets.token_bytes(NONCE_BYTES)
    channel.send(HostGreeting(version=__version__, nonce=own), timeout_s=HANDSHAKE_S)
    theirs = _hear_host_0(channel, HostQuestion).nonce
    channel.send(HostProof(proof=proof_by("guest", token, theirs, own)), timeout_s=HANDSHAKE_S)
    if not same_proof(_hear_host_0(channel, HostWelcome).proof, proof_by("host 0", token, own, theirs)):
        raise SecurityError("it does not know this host's token: give every host the same with --token")
    channel.trusted = True


def welcome(channel: Channel[HostMessage], token: str) -> None:
    """Let a host in, if it knows the token."""
    greeting = hear(channel, HostGreeting)
    own = secrets.token_bytes(NONCE_BYTES)
    channel.send(HostQuestion(nonce=own), timeout_s=HANDSHAKE_S)
    proof, expected = hear(channel, HostProof).proof, proof_by("guest", token, own, greeting.nonce)
    if len(greeting.nonce) != NONCE_BYTES or not same_proof(proof, expected):
        raise _sent_away(channel, "the token is not host 0's: give every host the same with --token")
    channel.trusted = True
    if greeting.version != __version__:
        theirs = printable(greeting.version[:MOST_QUOTED])
        raise OtherVersion(
            str(_sent_away(channel, f"host 0 runs Paceline {__version__} and another host {theirs}: use the same"))
        )
    channel.send(HostWelcome(proof=proof_by("host 0", token, greeting.nonce, own)), timeout_s=HANDSHAKE_S)


def _sent_away(channel: Channel[HostMessage], sentence: str) -> SecurityError:
    with contextlib.suppress(PacelineError):
        channel.send(RunRefused(sentence=sentence), timeout_s=HANDSHAKE_S)
    return SecurityError(sentence)


def hear(channel: Channel[HostMessage], kind: type[Said], timeout_s: float = HANDSHAKE_S) -> Said:
    """What the other side says next, which has to be of that kind."""
    return _of_kind(_next(channel, timeout_s), kind)


def _hear_host_0(channel: Channel[HostMessage], kind: type[Said]) -> Said:
    """The same of host 0, which alone may refuse instead."""
    heard = _next(channel, HANDSHAKE_S)
    if isinstance(heard, RunRefused):  # it has not proven yet that it is host 0
        raise SecurityError(printable(heard.sentence[:MOST_OF_A_REFUSAL]))
    return _of_kind(heard, kind)


def _next(channel: Channel[HostMessage], timeout_s: float) -> HostMessage:
    heard, _ = channel.receive(timeout_s)
    channel.end_body()
    return heard


def _of_kind(heard: HostMessage, kind: type[Said]) -> Said:
    if not isinstance(heard, kind):
        raise FrameError(f"{type(heard).__name__} has come and not {kind.__name__}")
    return heard


def notice_silence(connection: socket.socket, after_s: float) -> None:
    """Have the kernel end a connection whose other side is silent, also while something is on its way there."""
    quarter_s = max(1, int(after_s / 4))
    with contextlib.suppress(OSError):  # whoever uses it next finds out
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, quarter_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, quarter_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * after_s))
