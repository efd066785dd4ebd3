"""What a step is made of, once it is decided which tickets are in it: their order, their weights, their loss.

Arithmetic alone. Every server is sent the same value, and adds up in the order that stands in it.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.central.chief.tickets import Close, OpenTicket
from paceline.loss_value import LossPart, check_alike, nothing_counted, over_samples
from paceline.rules import Async


def close_of(step: int, tickets: Sequence[OpenTicket], rule: Async | None, compensation: float) -> Close:
    """Return the step with that number over `tickets`; `rule` corrects what is stale, a sync step has none."""
    ordered = sorted(tickets, key=lambda ticket: (ticket.work.epoch, ticket.work.runs[0].start))
    sizes = [ticket.samples for ticket in ordered]
    samples, loss = sum(sizes), _mean(step, [ticket.loss for ticket in ordered], sizes)
    assert loss.loss is not None
    of = samples if loss.loss.count is None else loss.loss.count
    accepted = [ticket.accepted(step, of, rule) for ticket in ordered]
    lr = rule.lr if rule is not None else 1.0
    return Close(step, ordered[0].chapter, samples, loss.loss.mean, accepted, lr, compensation, loss.means)


def _mean(step: int, parts: Sequence[LossPart], samples: Sequence[int]) -> LossPart:
    """Return what the losses of tickets of so many samples come to."""
    check_alike(parts)
    loss = over_samples([part.loss for part in parts if part.loss is not None], samples)
    if loss.count == 0:
        raise nothing_counted(step)
    logged = {name: over_samples([part.logged[name] for part in parts], samples) for name in parts[0].logged}
    return LossPart(loss, logged=logged)
