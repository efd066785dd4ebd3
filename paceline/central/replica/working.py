"""From a ticket to a settled one: what a replica does with the work it is given."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from paceline.central.client.client import Client
from paceline.central.messages.replies import Settled, Ticket
from paceline.deadlines import call_limit
from paceline.errors import LossError
from paceline.exchange.words import Phase
from paceline.loop.engine import Batch, Closed, Computed, ReplicaWork
from paceline.loop.passes import PlainWorker
from paceline.optim.host_copy import SameModel
from paceline.stoppable_calls import CallGivenUp, check_in_time, in_time


class ClientWorker(PlainWorker):
    """A worker whose gradients go to servers."""

    def __init__(self, client: Client, copy: SameModel) -> None:
        super().__init__(copy.on_device, client.replica)
        self._client, self._copy = client, copy

    def compute(self, batch: Batch, ticket: Ticket) -> Computed:
        """Computes a ticket, on the device that the model is on."""
        self._copy.bring(self._client.pulled)
        computed = batch.compute(self, ticket)
        self._copy.buffers_back()
        return computed

    def one_pass(self, work: ReplicaWork, number: int, batch: Any, *, is_last: bool) -> AbstractContextManager[None]:
        self._client.begin_pass(batch, is_last=is_last)
        return super().one_pass(work, number, batch, is_last=is_last)


@dataclass(frozen=True)
class Worked:
    """A ticket that was computed and handed in."""

    settled: Settled
    compute_ns: int
    wait_ns: int

    @property
    def closed(self) -> Closed:
        """The step that it went into, or the last one."""
        settled = self.settled
        return Closed(settled.loss, settled.samples, settled.replicas, logged=settled.logged)


def work_on(
    client: Client, batch: Batch, compute: Callable[[Ticket], Computed], enter: Callable[[Phase], None]
) -> Worked:
    """Computes a ticket and hands it in; again and with more samples, if one of the others dies meanwhile."""
    ticket: Ticket = batch.work.assignment
    limit = call_limit()
    before = [(buffer, buffer.clone()) for buffer in client.model.buffers()] if limit is not None else []
    began = time.monotonic_ns()
    while True:
        enter(Phase.COMPUTING)
        if client.pulled < ticket.version or not ticket.sync:
            client.pull(sync=ticket.sync)
        client.begin(ticket.ticket)
        try:
            with in_time(client.model, limit):
                computed = compute(ticket)
            check_in_time(limit)  # what is handed in is not taken back
        except CallGivenUp:
            assert limit is not None
            client.abandon()
            for buffer, value in before:
                buffer.copy_(value)
            client.give_back(ticket)
            raise limit.exceeded(f"replica {client.replica}") from None
        except BaseException:
            client.abandon()
            raise
        used = client.collector.finish()
        loss = computed.loss.loss
        counted_nothing = loss is not None and loss.count == 0
        if used and not any(used) and not client.tables and not counted_nothing:
            raise LossError("loss", "computed", "no parameter has a gradient; use the model that it is called with")
        computed_at = time.monotonic_ns()
        enter(Phase.AWAITING_SERVERS)
        client.push(ticket.ticket, used)
        answer = client.report(ticket.ticket, computed.loss)
        if isinstance(answer, Settled):
            break
        ticket = answer
    if ticket.sync:
        if answer.accepted is not None:
            client.expect(batch.coming())
        client.pull(sync=True)
    return Worked(answer, computed_at - began, time.monotonic_ns() - computed_at)
