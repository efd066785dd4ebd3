"""Parameters on their way to a replica: where the model points, and what a pull does.

Most parameters lie in one piece on one server, and the model points there. One that is cut between servers has memory
of its own, into which every pull copies its pieces.

A pull is complete before anything is computed. The front layers arrive first, and a forward could begin with them; but
a model may use any parameter at any time and outside of the module that holds it (a penalty in the loss, tied or
computed weights, a compiled graph), and nothing tells us so without a look at every operation. Too early a read would
be a wrong number that nobody notices.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from paceline.central.client.server_view import ServerView, as_one, server_of_all, slot_of
from paceline.central.jobs import together
from paceline.central.messages import replies, requests
from paceline.central.messages.coding import Coding
from paceline.central.shards import ShardPart, Shards
from paceline.errors import Stalled
from paceline.memory.heap import give_memory_back
from paceline.net.frames import Channel

# How parameters travel when gradients are coded so: coarser than 16 bits would be a different model.
PARAMETER_WIRE = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "int8": "fp16"}
PAUSE_S = 0.01  # between two looks at a server's memory


class Pulls:
    """Pulls the parameters of one replica's model."""

    def __init__(
        self,
        views: Sequence[ServerView],
        shards: Shards,
        parameters: Mapping[str, torch.Tensor],
        *,
        container: str,
        wire_name: str,
        timeout_s: float,
    ) -> None:
        self._views = views
        self._shards = shards
        self._parameters = parameters
        self._container = container
        self.place = 0  # of this replica
        self._wire = PARAMETER_WIRE[wire_name]
        self._timeout_s = timeout_s
        self.version = -1  # of the parameters that the model has
        self._count = 0  # of pulls
        self.sync = True  # the rule under which they were pulled
        self._elsewhere = False  # a server was started again, and has other memory than the model points at
        self._live: bool | None = None  # whether the model points at servers' own memory, where that is shared
        self._cut: list[
            tuple[torch.Tensor, Sequence[ShardPart]]
        ] = []  # parameters in several places, and where those are

    @property
    def pulled(self) -> int:
        """The version of the parameters that the model points at; -1: it has to pull first."""
        return -1 if self._elsewhere else self.version

    @property
    def has_copy(self) -> bool:
        """Whether the model points at this replica's copy, in the memory of the servers."""
        return self._live is False

    def moved(self) -> None:
        """A server has other memory now."""
        self._live, self._elsewhere = None, True

    def mark(self) -> object:
        """Returns what is the same again as long as nobody but the script can have written to the parameters; None if
        a server is just writing them."""
        writes = [bytes(view.arena.words) for view in self._views if self._live and view.arena is not None]
        if any(count % 2 for words in writes for count in memoryview(words).cast("q")[1:]):
            return None
        return self._count, self._live, writes

    def points_at_server(self, name: str) -> bool:
        """Whether the model has this parameter in the memory of a server, and not a copy."""
        server = server_of_all(self._shards, self._shards.parts[name])
        return bool(self._live) and server is not None and self._views[server].arena is not None

    def uses_older(self, version: int) -> None:
        """Something that was computed with is older than the parameters."""
        self.version = min(self.version, version)

    def pull(self, *, sync: bool, at_least: int) -> None:
        """Have the parameters as they are now. In a sync run nobody writes them while somebody computes."""
        versions = [0] * len(self._views)
        self._count += 1

        def pull_from(number: int) -> None:
            view = self._views[number]
            if view.arena is None:
                versions[number] = self._pull_over_tcp(view, at_least)
            else:
                versions[number] = self._pull_shared(view, at_least, copy=not sync)

        apart = [number for number, view in enumerate(self._views) if view.arena is None]
        for number in set(range(len(self._views))) - set(apart):
            pull_from(number)
        if apart:
            together([partial(pull_from, number) for number in apart])
        self._point(live=sync)
        for own, parts in self._cut:
            for part in parts:
                view = self._views[part.server]
                own[part.start : part.stop] = slot_of(self._seen(view, live=sync), view.layout, part.slot)
        self.version, self._elsewhere, self.sync = min(versions), False, sync

    def _pull_shared(self, view: ServerView, at_least: int, *, copy: bool) -> int:
        """The version that lies in the memory of a server, after it was copied to this replica's place.

        If it is not what it should be, the server is asked: when it was started again, its memory is another one.
        """
        give_up = time.monotonic() + self._timeout_s
        while True:
            arena = view.arena
            assert arena is not None
            if (version := arena.version) >= at_least:
                found = arena.copy_parameters(arena.pulled[self.place]) if copy else version
                if found is not None:
                    return found
            if time.monotonic() > give_up:
                raise Stalled(
                    f"this replica waited {self._timeout_s:g} s for {view.connection.name} to make step {at_least}"
                )
            view.connection.call(requests.Containers(), replies.Listed)
            if view.arena is arena:
                time.sleep(PAUSE_S)

    def _pull_over_tcp(self, view: ServerView, at_least: int) -> int:
        coding = Coding(view.layout, self._wire)

        def read(channel: Channel[replies.Reply], _: int) -> None:
            coding.read(channel, view.parameters, reversed(view.layout.chunks))

        request = requests.Pull(container=self._container, replica=self.place, at_least=at_least, wire=self._wire)
        return int(view.connection.wait(request, replies.Pulled, read=read).step)

    # ── where the model points ───────────────────────────────────────────────────────────────────────────

    def _point(self, *, live: bool) -> None:
        """Have the model use the servers' own memory (live), or this replica's copy."""
        if self._live is live:
            return
        self._live = live
        self._cut = []
        for name, parameter in self._parameters.items():
            parts = self._shards.parts[name]
            server = server_of_all(self._shards, parts)
            if server is None:
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype)
                self._cut.append((parameter.data.view(-1), parts))
            else:
                view = self._views[server]
                parameter.data = as_one(self._seen(view, live=live), view.layout, parts, parameter)
        give_memory_back()  # what the parameters were before

    def _seen(self, view: ServerView, *, live: bool) -> torch.Tensor:
        if view.arena is None:
            return view.parameters
        return view.arena.parameters if live else view.arena.pulled[self.place]
