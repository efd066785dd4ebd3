"""A chapter's samples as the chief hands them out, ticket by ticket.

Replicas need not be at the same step, nor make the same number of them. What they do have in common, an epoch's end, an
evaluation, a save, the chief's books tell them: a replica that is started again runs its script from the first line,
and the books answer for everything that lies behind.

The books are the container's, and a container may outlive a run (`--join`). A later run in it is answered in the same
way: epochs that were trained are not trained again, and evaluations at places of the script that lie behind have the
result they had; with more epochs it goes on from there. What a run has *done*, such as a save, it has done for itself:
a later run does it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from paceline.central.messages.replies import Ended, Ticket
from paceline.data.ahead import Request
from paceline.data.book import cut
from paceline.loop.engine import Chapter, Closed, ReplicaWork
from paceline.seeds import mixed


@dataclass
class TicketSamples:
    """Tickets for every replica that this process is."""

    chapter: Chapter
    ask: Callable[[Chapter], Sequence[Ticket] | Ended]
    give_back: Callable[[], None]
    # This process is one replica; several draw random numbers from one sequence, and not all are seen at once.
    alone: bool = True
    stopped: bool = False

    def next(self) -> Sequence[ReplicaWork]:
        answer = self.ask(self.chapter)
        if isinstance(answer, Ended):
            self.stopped = answer.stop
            return []
        return [self.work(ticket) for ticket in answer]

    def work(self, assignment: Ticket) -> ReplicaWork:
        epoch, ranges = self._request(assignment)
        return ReplicaWork(
            assignment=assignment,
            step=assignment.step,
            epoch=epoch,
            ranges=ranges,
            first=assignment.runs[0][0],
            whole=sum(map(len, ranges)),
            seed=mixed(self.chapter.ledger.seed, assignment.step, assignment.part) if self.alone else None,
        )

    def _request(self, ticket: Ticket) -> Request:
        runs = [range(start, stop) for start, stop in ticket.runs]
        return ticket.epoch, tuple(run for piece in cut(runs, self.chapter.accumulate) for run in piece)

    def following(self, work: ReplicaWork) -> Sequence[Request]:
        """As the chief says; or in a sync run the same part of the next batch."""
        ticket, ledger = work.assignment, self.chapter.ledger
        # What the other replicas of an async process wait for would be dropped, and loaded twice.
        if not self.alone and not ticket.sync:
            return []
        if ticket.following is not None:
            epoch, runs = ticket.following
            return [self._request(msgspec.structs.replace(ticket, epoch=epoch, runs=runs))]
        if not ticket.exact or len(ticket.runs) != 1 or ledger.length is None:
            return []
        start, stop = (edge + ledger.batch_size for edge in ticket.runs[0])
        if stop > ledger.length:
            return []
        return [self._request(msgspec.structs.replace(ticket, runs=[(start, stop)]))]

    def commit(self, closed: Closed) -> None:
        """The chief has counted them."""

    def close(self) -> None:
        self.give_back()
