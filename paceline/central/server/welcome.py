"""Who is let in: whoever proves that it knows the token, or has a certificate. All others are strangers.

    client ──Hello──▶ server ──Challenge: a number never used before──▶ client ──Proof──▶ server ──Done──▶ client

The proof is a hash of number and token. So the token itself never travels, and what somebody has recorded of a
connection is of no use on another.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from typing import TypeVar

from paceline import __version__
from paceline.central.messages import replies, requests
from paceline.errors import PacelineError
from paceline.net.frames import Channel, FrameError, printable
from paceline.net.secure import LINGER_S, proof_of, same_proof

HELLO_WITHIN_S = 10.0
MOST_QUOTED = 40
NONCE_BYTES = 32

Kind = TypeVar("Kind", requests.Hello, requests.Proof)


def welcome(channel: Channel[requests.Request], connection: socket.socket, token: str | None) -> None:
    """Listen to nobody who does not prove that it knows the token; None: its certificate has told who it is."""
    try:
        hello = _hear(channel, requests.Hello, "a greeting")
    except FrameError as error:
        # In a frame of ours: a client of another version, or one with keys, learns from it what is wrong.
        _send_away(channel, connection, str(error))
        raise
    sentence = None
    if hello.version != __version__:
        theirs = printable(hello.version[:MOST_QUOTED])
        sentence = f"this server runs Paceline {__version__} and the client {theirs}: use the same version"
    elif token is not None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        channel.send(replies.Challenge(nonce=nonce), timeout_s=HELLO_WITHIN_S)
        proof = _hear(channel, requests.Proof, "a proof").proof
        if not same_proof(proof, proof_of(token, nonce)):
            sentence = "the token is not this server's: give the run folder, or the file, it has written it to"
    if sentence is not None:
        _send_away(channel, connection, sentence)
        raise FrameError(f"refused {hello.who[:MOST_QUOTED]!r}: {sentence}")
    channel.trusted = True
    channel.send(replies.Done())


def _hear(channel: Channel[requests.Request], kind: type[Kind], name: str) -> Kind:
    heard, _ = channel.receive(HELLO_WITHIN_S)
    channel.end_body()
    if not isinstance(heard, kind):
        raise FrameError(f"what has come is not {name}")
    return heard


def _send_away(channel: Channel[requests.Request], connection: socket.socket, sentence: str) -> None:
    """Tell a stranger why, and let it read that: with bytes unread here the close that follows would be a reset."""
    give_up = time.monotonic() + LINGER_S
    with contextlib.suppress(PacelineError, OSError):
        channel.send(replies.Refused(sentence=sentence), timeout_s=LINGER_S)
        socket.socket.shutdown(connection, socket.SHUT_WR)
        while (left := give_up - time.monotonic()) > 0:
            socket.socket.settimeout(connection, left)
            if not socket.socket.recv(connection, 4096):
                break
