"""One server, as a replica sees it: the connection, and the memory in which that server's share lies.

On the same host that is the server's own memory: gradients are written where the server adds them up, and in a sync run
the model's parameters simply *are* the server's. Elsewhere it is memory of this process, filled and emptied over TCP.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from paceline.central.messages import replies
from paceline.central.messages.connection import Connection
from paceline.central.messages.tensor_bytes import bytes_of
from paceline.central.shards import ShardPart, Shards
from paceline.exchange.feedback import Feedback
from paceline.exchange.wire import wire
from paceline.memory.layout import FlatLayout
from paceline.memory.server_arena import ServerArena
from paceline.net.frames import Channel
from paceline.net.secure import Keys


@dataclass(frozen=True)
class ServerAddresses:
    """Where the servers of a container are, and how to be let in."""

    addresses: Sequence[str]
    container: str
    token: str = ""
    keys: Keys | None = None
    first_contact_s: float | None = None  # how long to try, of servers whose addresses somebody has typed

    def connection(self, number: int, who: str, timeout_s: float, first_contact_s: float | None = None) -> Connection:
        """Return a connection to one of them, on which `who` speaks."""
        return Connection(
            self.addresses[number],
            token=self.token,
            keys=self.keys,
            who=who,
            name=f"server {number}",
            timeout_s=timeout_s,
            first_contact_s=first_contact_s,
        )


@dataclass
class ServerView:
    """What a replica has of one server."""

    connection: Connection
    layout: FlatLayout
    opened: replies.Opened | None = None
    arena: ServerArena | None = None  # the server's own memory, if it can be shared
    parameters: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    gradients: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    feedback: dict[int, Feedback] = field(default_factory=dict)  # by chunk, of a lossy wire
    tables: list[torch.Tensor] = field(default_factory=list)  # its rows of each, if memory can be shared

    def use_own_memory(self, wire_name: str) -> None:
        """Use memory of this process, where the server's cannot be shared."""
        self.parameters = torch.zeros(self.layout.bytes, dtype=torch.uint8)
        self.gradients = torch.zeros(self.layout.bytes, dtype=torch.uint8)
        coding = wire(wire_name)
        if coding.lossy:
            self.feedback = {
                number: Feedback(chunk.bytes // 4, coding)
                for number, chunk in enumerate(self.layout.chunks)
                if chunk.dtype == torch.float32
            }

    def close(self) -> None:
        self.connection.close()
        if self.arena is not None:
            self.arena.close()


def into(flat: torch.Tensor) -> Callable[[Channel[replies.Reply], int], None]:
    """Return a function that reads a reply's body into a tensor."""

    def read(channel: Channel[replies.Reply], _: int) -> None:
        channel.read_body(bytes_of(flat))

    return read


def slot_of(flat: torch.Tensor, layout: FlatLayout, number: int) -> torch.Tensor:
    """Return a slot of a flat buffer, as elements in a row."""
    slot = layout.slots[number]
    return flat[slot.offset : slot.offset + slot.bytes].view(slot.dtype)


def server_of_all(shards: Shards, parts: Sequence[ShardPart]) -> int | None:
    """Return the one server on which all parts of a parameter lie one after another; None if there is none."""
    server = parts[0].server
    slots = shards.layouts[server].slots
    for before, after in itertools.pairwise(parts):
        if after.server != server or slots[after.slot].offset != slots[before.slot].offset + slots[before.slot].bytes:
            return None
    return server


def as_one(flat: torch.Tensor, layout: FlatLayout, parts: Sequence[ShardPart], like: torch.Tensor) -> torch.Tensor:
    """Return all parts of a parameter, which lie one after another, as one tensor of its shape."""
    start = layout.slots[parts[0].slot].offset
    return flat[start : start + like.numel() * like.dtype.itemsize].view(like.dtype).view(like.shape)
