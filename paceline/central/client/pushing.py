"""Gradients on their way from a replica: collected where the servers see them, or sent, while backward still runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

import torch
from torch import nn

from paceline.central.client.arrival import Arrival
from paceline.central.client.server_view import ServerView, as_one, server_of_all, slot_of
from paceline.central.jobs import BackgroundJob, together
from paceline.central.messages import replies, requests
from paceline.central.messages.coding import Coding
from paceline.central.messages.tensor_bytes import bytes_of
from paceline.central.shards import ShardPart, Shards
from paceline.central.tables.tables import Rows
from paceline.optim.gradients import Destination, GradientCollector, IntoBuffer


class Pushes:
    """Pushes the gradients of one replica."""

    def __init__(
        self,
        views: Sequence[ServerView],
        shards: Shards,
        parameters: Mapping[str, nn.Parameter],
        *,
        push: Callable[..., requests.Push],
        place: int,
        early: bool,
        announced: bool,
    ) -> None:
        """`push` makes the request. `early`: what is sent may be sent while backward runs. `announced`: servers are
        told also of what lies in their own memory."""
        self._views = views
        self._shards = shards
        self._parameters = parameters
        self._push = push
        self._place = place
        self._announced = announced
        self._arrival = Arrival(shards)
        self._marks = [torch.ones(len(view.layout.slots), dtype=torch.uint8) for view in views]
        self._ticket: int | None = None  # the one that is being computed
        self._early: dict[int, BackgroundJob] = {}  # by server: gradients that are being sent while backward runs
        self.collector = GradientCollector(
            [parameters[name] for name in shards.names],
            [self._destination(name) for name in shards.names],
            self._arrived if early and any(view.arena is None for view in views) else None,
        )

    def _destination(self, name: str) -> Destination:
        parts = self._shards.parts[name]
        server = server_of_all(self._shards, parts)
        if server is not None:
            view = self._views[server]
            return IntoBuffer(as_one(view.gradients, view.layout, parts, self._parameters[name]))
        views = [self._views[part.server] for part in parts]
        return _Pieces(
            [(slot_of(view.gradients, view.layout, part.slot), part) for view, part in zip(views, parts, strict=True)]
        )

    def moved(self) -> None:
        """A server has other memory now."""
        self.collector.redirect([self._destination(name) for name in self._shards.names])

    def begin(self, ticket: int | None) -> None:
        """A step begins: whatever backward produces from now on belongs to it."""
        self._ticket = ticket
        self._arrival.begin()
        self.collector.begin()

    def push(self, ticket: int, used: Sequence[bool], rows: Sequence[Sequence[Rows]]) -> None:
        """Leave what was collected, and the gradients of rows (by server), with all servers."""
        early, self._early = self._early, {}
        untouched: list[list[int]] = [[] for _ in self._views]
        for name, was_used in zip(self._shards.names, used, strict=True):
            if not was_used:
                for part in self._shards.parts[name]:
                    untouched[part.server].append(part.slot)
        for number, slots in enumerate(untouched):
            self._marks[number].fill_(1)
            self._marks[number][slots] = 0
        self._arrival.finish()
        jobs = [
            early[number].result if number in early else partial(self._push_to, view, ticket, slots, own)
            for number, (view, slots, own) in enumerate(zip(self._views, untouched, rows, strict=True))
        ]
        together(jobs)

    def abandon(self) -> None:
        """Give up a step that will not be completed."""
        self.collector.stop()
        self._arrival.give_up()
        for number, job in self._early.items():
            job.wait()
            self._views[number].connection.disconnect()  # half of a gradient has been sent
        self._early = {}

    def settle(self, *, accepted: bool) -> None:
        """What a lossy wire has lost is owed from now on, if the gradient was used."""
        for view in self._views:
            for feedback in view.feedback.values():
                feedback.commit() if accepted else feedback.rollback()

    # ── while backward runs ──────────────────────────────────────────────────────────────────────────────

    def _arrived(self, parameter: int) -> None:
        """A gradient is complete. The first one of a step starts the senders."""
        self._arrival.arrived(parameter)
        if self._ticket is not None and not self._early:
            for number, view in enumerate(self._views):
                if view.arena is None:
                    self._early[number] = BackgroundJob(partial(self._push_early, number, view, self._ticket))

    def _push_early(self, number: int, view: ServerView, ticket: int) -> None:
        request = self._push(ticket=ticket, marks=True)
        coding = Coding(view.layout, request.wire)

        def body() -> Iterator[memoryview]:
            yield from _coded(view, coding, partial(self._arrival.wait, number))
            self._arrival.wait_for_all()
            yield bytes_of(self._marks[number])

        total = coding.bytes + len(view.layout.slots)
        view.connection.call(request, replies.Done, body=body, body_bytes=total)

    # ── afterwards ───────────────────────────────────────────────────────────────────────────────────────

    def _push_to(self, view: ServerView, ticket: int, untouched: list[int], rows: Sequence[Rows]) -> None:
        counts = [len(given.ids) for given in rows]
        request = self._push(ticket=ticket, untouched=untouched, shared=view.arena is not None, rows=counts)
        tail = [bytes_of(part) for given in rows for part in given.tensors]
        tail_bytes = sum(part.nbytes for part in tail)
        if view.arena is None:
            coding = Coding(view.layout, request.wire)
            view.connection.call(
                request,
                replies.Done,
                body=lambda: chain(_coded(view, coding), tail),
                body_bytes=coding.bytes + tail_bytes,
            )
        elif self._announced or rows:
            view.connection.call(request, replies.Done, body=lambda: tail)
        else:
            touched = view.arena.touched[self._place]
            touched.fill_(1)
            if untouched:
                touched[untouched] = 0

    def close(self) -> None:
        self.collector.close()


def _coded(view: ServerView, coding: Coding, wait: Callable[[int], None] = lambda _: None) -> Iterator[memoryview]:
    """Yield the gradient for a server, chunk after chunk; each as soon as `wait` returns."""
    room = coding.room()
    for number, chunk in enumerate(view.layout.chunks):
        wait(number)
        feedback = view.feedback.get(number)
        if feedback is not None:
            coded = room[: coding.bytes_of(chunk)]
            feedback.encode(view.gradients[chunk.start : chunk.stop].view(torch.float32), coded)
        else:
            coded = coding.encode(view.gradients, chunk, room)
        yield bytes_of(coded)


class _Pieces:
    """Several places for the parts of one gradient."""

    def __init__(self, pieces: Sequence[tuple[torch.Tensor, ShardPart]]) -> None:
        self._pieces = pieces

    def put(self, gradient: torch.Tensor) -> None:
        flat = _dense(gradient)
        for place, part in self._pieces:
            place.copy_(flat[part.start : part.stop])

    def add(self, gradient: torch.Tensor) -> None:
        flat = _dense(gradient)
        for place, part in self._pieces:
            place.add_(flat[part.start : part.stop])

    def zero(self) -> None:
        for place, _ in self._pieces:
            place.zero_()


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return (gradient if gradient.layout is torch.strided else gradient.to_dense()).reshape(-1)
