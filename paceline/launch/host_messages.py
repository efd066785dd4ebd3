"""What the supervisors of a run's hosts say to each other, as fixed schemas. Who is let in: `host_greeting`."""

from __future__ import annotations

import msgspec


class _Said(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Every message is told by its name."""


class HostGreeting(_Said, frozen=True, kw_only=True):
    """Somebody wants to come in."""

    version: str
    nonce: bytes


class HostQuestion(_Said, frozen=True, kw_only=True):
    """Host 0 wants a proof made with this number."""

    nonce: bytes


class HostProof(_Said, frozen=True, kw_only=True):
    """The proof that whoever comes knows the token."""

    proof: bytes


class HostWelcome(_Said, frozen=True, kw_only=True):
    """The proof that host 0 knows it too."""

    proof: bytes


class HostComes(_Said, frozen=True, kw_only=True):
    """A host is there: what was asked for on it, and where its servers listen."""

    host: int
    settings: dict[str, str]
    servers: dict[int, str]  # addresses by number


class RunBegins(_Said, frozen=True, kw_only=True):
    """All hosts are there."""

    container: str
    addresses: list[str]  # of all servers
    hosts: list[int]  # that the run begins with, or has
    joins: bool = False  # it has begun before, and this host is to join it


class RunRefused(_Said, frozen=True, kw_only=True):
    """There will be no run, and why."""

    sentence: str


class StopAsked(_Said, frozen=True, kw_only=True):
    """All are to end after the step they are at."""

    code: int
    by: str


class RunFailed(_Said, frozen=True, kw_only=True):
    """A host cannot go on, and so nobody does."""

    host: int
    code: int
    sentence: str


class ReplicaEnded(_Said, frozen=True, kw_only=True):
    """The process of a replica has ended; None: whichever process it was."""

    replica: int
    incarnation: int | None


class ReplicaStarted(_Said, frozen=True, kw_only=True):
    """Another process was started in the place of one that has ended."""

    replica: int


class HostLost(_Said, frozen=True, kw_only=True):
    """The connection to a host has ended before the run has."""

    host: int
    why: str


class HostFinished(_Said, frozen=True, kw_only=True):
    """All replicas of a host have ended. `trained`: at least one of them to its good end, or nobody was killed."""

    code: int
    trained: bool


class RunOver(_Said, frozen=True, kw_only=True):
    """All hosts have finished: servers are not needed any more, and this is how the run has ended."""

    code: int


class StillHere(_Said, frozen=True, kw_only=True):
    """Nothing has happened: a host that does not even say that is gone."""


class ViewWanted(_Said, frozen=True, kw_only=True):
    """A host cannot go on in a view: these are its rows that can in another."""

    host: int
    rows: list[int]
    failed: int
    died: bool = False  # because some of its rows have
    let_in_at: int = 0  # because hosts are to be let in, in that op


class ViewProposed(_Said, frozen=True, kw_only=True):
    """From host 0: these rows of each host go on, and nobody does anything in an earlier view once it has entered."""

    number: int
    rows: dict[int, list[int]]  # by host
    let_in_at: int = 0  # the op in which those that are new get the run's state


class ViewEntered(_Said, frozen=True, kw_only=True):
    """All replicas of a host have entered a view; the last op that it knows to be decided, and where its store is."""

    host: int
    number: int
    decided: int
    store: str


class ViewOpened(_Said, frozen=True, kw_only=True):
    """From host 0: all hosts have entered it."""

    number: int
    decided: int  # the last op that any host knew to be
    store: str  # address and port


class HostReady(_Said, frozen=True, kw_only=True):
    """All replicas of a host that joins have come to where they need the run's state."""

    host: int
    rows: list[int]
    trainer: int  # which of its script's this is
    model: int  # a fingerprint of what it trains


class HostsMayJoin(_Said, frozen=True, kw_only=True):
    """From host 0: hosts are ready, and may be let in after a step of that view."""

    number: int


HostMessage = (
    HostGreeting
    | HostQuestion
    | HostProof
    | HostWelcome
    | HostComes
    | RunBegins
    | RunRefused
    | StopAsked
    | RunFailed
    | ReplicaEnded
    | ReplicaStarted
    | HostLost
    | HostFinished
    | RunOver
    | StillHere
    | ViewWanted
    | ViewProposed
    | ViewEntered
    | ViewOpened
    | HostReady
    | HostsMayJoin
)
ViewMessage = ViewWanted | ViewProposed | ViewEntered | ViewOpened | HostReady | HostsMayJoin
ReplicaNews = ReplicaEnded | ReplicaStarted
HOST_MESSAGES: msgspec.msgpack.Decoder[HostMessage] = msgspec.msgpack.Decoder(HostMessage)
