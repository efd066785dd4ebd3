"""What the driver and its agents say to each other: JSON, a line each, over whatever stdin and stdout the engine has.

    agent  ──AgentReady──▶ driver            it is on this node, and would meet the others at this address
    agent  ◀──HostBegins── driver            all are there: run this
    agent  ──HostPrinted──▶ driver           …
    agent  ◀──HostSignal── driver            as if somebody had typed Ctrl-C there
    agent  ──HostEnded──▶ driver

An engine may hand one line of the driver to every agent, and mix the lines of all agents: so each names its host, and
is short enough to be passed on as a whole.
"""

from __future__ import annotations

import msgspec

MOST_PRINTED_BYTES = 2048  # of a message: as base64, and with all else around it, less than the 4096 of an atomic write


class _Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Every message is told by its name."""

    host: int


class AgentReady(_Line, frozen=True, kw_only=True):
    """An agent runs. `node`: what its engine calls the machine."""

    node: str
    address: str
    port: int  # that is free there
    versions: dict[str, str]  # of packages that have to be the same everywhere


class HostPrinted(_Line, frozen=True, kw_only=True):
    """Somebody on that host has printed this, to stderr or to stdout."""

    data: bytes
    error: bool


class HostEnded(_Line, frozen=True, kw_only=True):
    """The run of that host has ended; `code` as Python's subprocess has it: of a signal that number, negative."""

    code: int


class HostRefused(_Line, frozen=True, kw_only=True):
    """The host cannot begin, and why."""

    sentence: str


class HostBegins(_Line, frozen=True, kw_only=True):
    """Start this."""

    arguments: list[str]  # of `paceline`
    folder: str | None  # where; None: where the agent is
    token: str | None = None  # for servers, if the user has given no file with one
    terminal: tuple[int, int] | None = None  # columns and lines of the one that stderr leads to, if it does
    all_there: bool = False  # whether stdout leads there too


class HostSignal(_Line, frozen=True, kw_only=True):
    """Pass that on to the run."""

    number: int


class HostGone(_Line, frozen=True, kw_only=True):
    """Said by the engine, and not by an agent: the node is gone, or what ran there."""

    why: str


FromAgent = AgentReady | HostPrinted | HostEnded | HostRefused
FromDriver = HostBegins | HostSignal
FROM_AGENT: msgspec.json.Decoder[FromAgent] = msgspec.json.Decoder(FromAgent)
FROM_DRIVER: msgspec.json.Decoder[FromDriver] = msgspec.json.Decoder(FromDriver)


def line_of(message: FromAgent | FromDriver) -> bytes:
    """
    >>> line_of(HostEnded(host=2, code=0))
    b'{"type":"HostEnded","host":2,"code":0}\\n'
    """
    return msgspec.json.encode(message) + b"\n"
