"""From a ticket to a settled one: what a replica does with the work it is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.central.client.client import Client
from paceline.central.wire.protocol import Settled, Ticket
from paceline.errors import LossError
from paceline.exchange.board import Phase
from paceline.loop.engine import Computed


@dataclass(frozen=True)
class Worked:
    """A ticket that was computed and handed in."""

    settled: Settled
    compute_ns: int
    wait_ns: int


def work_on(
    client: Client,
    ticket: Ticket,
    compute: Callable[[Ticket], Computed],
    enter: Callable[[Phase], None],
    coming: Callable[[], Sequence[Any]],
) -> Worked:
    """Compute a ticket and hand it in; again and with more samples, if one of the others dies meanwhile.

    `coming`: the batches of what this replica will most likely compute next, if they are there.
    """
    began = time.monotonic_ns()
    while True:
        enter(Phase.COMPUTING)
        if client.pulled < ticket.step or not ticket.sync:
            client.pull(sync=ticket.sync)
        client.begin(ticket.ticket)
        try:
            computed = compute(ticket)
        except BaseException:
            client.abandon()
            raise
        used = client.collector.finish()
        if used and not any(used) and not client.tables:
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
            client.expect(coming())
        client.pull(sync=True)
    return Worked(answer, computed_at - began, time.monotonic_ns() - computed_at)
