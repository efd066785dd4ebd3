"""The open step of a sync rule: which parts of its batch are with whom, and when it can be closed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from paceline.central.chief.tickets import OpenTicket
from paceline.data.book import Runs, cut, merged


@dataclass(eq=False)
class OpenStep:
    """A step for whoever can help with it. An exact one is made of all parts of one batch, and nothing else."""

    chapter: int
    epoch: int
    size: int  # samples of a part, for spares
    accept: int  # how many tickets close it
    exact: bool
    parts: deque[tuple[int, Runs]]  # not handed out
    next_part: int
    tickets: list[OpenTicket] = field(default_factory=list)
    reported: list[OpenTicket] = field(default_factory=list)  # those of them that have been, in order of arrival

    @classmethod
    def over(cls, chapter: int, epoch: int, runs: Sequence[range], accept: int, helpers: int) -> OpenStep:
        """Return a step over these samples, which the first `accept` of so many helpers close."""
        size = max(1, -(-sum(map(len, runs)) // accept))
        parts = deque((part, piece) for part, piece in enumerate(cut(runs, accept)) if piece)
        return cls(chapter, epoch, size, len(parts), accept == helpers, parts, next_part=len(parts))

    def of(self, replica: int) -> OpenTicket | None:
        """Return the ticket of that replica."""
        return next((ticket for ticket in self.tickets if ticket.replica == replica), None)

    def without_ticket(self, helpers: Iterable[int]) -> list[int]:
        """Return those of the helpers who may still ask for a part."""
        taken = {ticket.replica for ticket in self.tickets}
        return [helper for helper in helpers if helper not in taken]

    def share(self, helpers: int, others: int) -> int:
        """Return how many parts one of the helpers should take of those for which there are not enough `others`."""
        if not self.exact:
            return 0
        return max(0, min(len(self.parts) - others, -(-len(self.parts) // max(1, helpers))))

    def take_parts(self, number: int) -> tuple[int, Runs]:
        """Return the number of the first of so many parts, and the samples of them all."""
        taken = [self.parts.popleft() for _ in range(number)]
        return taken[0][0], tuple(merged(run for _, runs in taken for run in runs))

    def put_first(self, part: int) -> None:
        """Have that part taken next, if nobody has it."""
        for at, entry in enumerate(self.parts):
            if entry[0] == part:
                del self.parts[at]
                self.parts.appendleft(entry)
                return

    def return_ticket(self, ticket: OpenTicket) -> bool:
        """Take back a ticket that nobody will report; return whether its samples are a part of this step still."""
        self.tickets.remove(ticket)
        if self.exact:
            self.parts.appendleft((ticket.work.part, ticket.work.runs))
        return self.exact

    def drop_reported(self, ticket: OpenTicket) -> None:
        """Take out a ticket that will be computed again, with more samples."""
        self.tickets.remove(ticket)
        self.reported.remove(ticket)

    def enough(self, spares: Callable[[], int]) -> list[OpenTicket]:
        """Return the tickets that close it; none while others should be waited for.

        `spares` returns how many more tickets could be handed out, if it is not exact.
        """
        coming = len(self.tickets) - len(self.reported)
        if self.exact:
            return [] if self.parts or coming else self.reported
        first = self.reported[: self.accept]
        return first if len(first) >= min(self.accept, len(first) + coming + spares()) else []

    def spares(self, helpers: Iterable[int], free: int) -> int:
        """Return how many more tickets these helpers could take; `free`: samples that nobody has."""
        return min(len(self.without_ticket(helpers)), len(self.parts) + -(-free // self.size))

    def lacks_for(self, replica: int) -> set[int]:
        """Return whom a replica waits for that wants a part of it, and has none because there is none left."""
        if not self.exact or self.parts or self.of(replica) is not None:
            return set()
        return {ticket.replica for ticket in self.tickets if not ticket.pushed}

    def held_up_by(self, replica: int) -> set[int]:
        """Return who has reported, and waits for the part that this replica has."""
        own = self.of(replica)
        if not self.exact or own is None or own.pushed:
            return set()
        return {ticket.replica for ticket in self.tickets if ticket.pushed}

    def waits_for(self, members: Collection[int]) -> str:
        """Return whom it waits for, in words."""
        missing = sorted(ticket.replica for ticket in self.tickets if not ticket.pushed) or sorted(
            self.without_ticket(members)
        )
        return "replicas " + ", ".join(map(str, missing)) if missing else "the servers to update"
