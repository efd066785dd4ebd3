"""The chief: hands out samples, and decides which gradients make up a step. One of the servers plays this part.

There is one mechanism for all rules. A replica asks for work and gets a *ticket*: some samples, to be computed on the
parameters as they are now. It computes, leaves its gradient with the servers, and reports. At some point the rule finds
that there is enough, and the chief closes a step with one explicit list of accepted tickets, which every server reduces
in the same order:

    ask ──▶ ticket ──▶ compute, push ──▶ report ──▶ ┌ accepted: its samples are counted with the step
                                                    └ late: they are given back, and go into a later step

Sync closes when all parts of a batch have been reported, or the first k; async at each report. Whoever dies is taken
off the list of members, and its samples return. Nobody ever waits for a ticket that nobody holds: k shrinks when data
or members run out. A replica has one gradient with the servers, so it gets no other ticket before that is settled.

Replicas need not be at the same place of the script: one breaks out of its loop, one was started again. A step is for
those who can be at its place; whoever is further on waits for the others, and does not hold them up.

This is plain bookkeeping: no clock, no socket, no tensor. Its owner calls it under a lock, and looks for a step to
close (`next_close`) after whatever may have changed something: ask, report, leave, a new rule. There it is decided that
a gradient is late, or (`_close_async`) too stale.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

import msgspec

from paceline.central.chief.books import Books
from paceline.central.chief.closing import close_of
from paceline.central.chief.members import ReplicaMembers
from paceline.central.chief.open_books import OpenBooks
from paceline.central.chief.open_step import OpenStep
from paceline.central.chief.pace import Pace
from paceline.central.chief.reservations import Reservations
from paceline.central.chief.tasks import TaskKey, Tasks
from paceline.central.chief.tickets import Close, End, OpenTicket, Outcome, Wait, Work
from paceline.data.book import Book, Runs, merged
from paceline.loss_value import LossPart
from paceline.rules import Async, Rule, Sync


class Chief:
    """Keeps the books of one container's training."""

    def __init__(
        self, rule: Rule, replicas: int, *, warmup_steps: int = 0, warmup_epochs: int = 0, first_ticket: int = 1
    ) -> None:
        """`first_ticket`: a chief that follows one that has died gives a number above all that one can have used."""
        self.rule = rule
        self.open_books = OpenBooks()
        self.stopping = False
        self.tasks = Tasks()  # between steps
        self._members = ReplicaMembers(replicas)
        self._warmup_steps, self._warmup_epochs = warmup_steps, warmup_epochs
        self._tickets: dict[int, OpenTicket] = {}  # neither accepted nor given back
        self._next_ticket = first_ticket
        self._open: OpenStep | None = None
        self._reported: deque[OpenTicket] = deque()  # async: in order of arrival
        self._reservations = Reservations(self.book)
        self._closing: Close | None = None
        self._pace = Pace()

    @property
    def step(self) -> int:
        """How many have been closed."""
        return self.open_books.step

    @property
    def version(self) -> int:
        """The version of the parameters: how many steps were made of them, by this run and others."""
        return self.open_books.version

    @property
    def last(self) -> Outcome:
        """How the last step went."""
        return self.open_books.last

    # ── members ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    def members(self) -> dict[int, int]:
        """The incarnation of every replica that takes part; 0: it is expected, and was not yet seen."""
        return self._members.present

    def join(self, replica: int, incarnation: int) -> None:
        """A process takes the place of `replica`. An older process in that place is not listened to any more."""
        newest = self._members.newest(replica)
        if incarnation > newest:
            self.leave(replica, newest)
        self._members.join(replica, incarnation)

    def leave(self, replica: int, incarnation: int | None = None) -> None:
        """That process has ended: its samples return. What it has pushed is still good."""
        if not self._members.leave(replica, incarnation):
            return
        held = self._held(replica)
        if held is not None:
            self._return(held)
        self._reservations.cancel(replica)
        self._pace.leave(replica)
        self.tasks.leave(replica)

    def is_member(self, replica: int, incarnation: int) -> bool:
        return self.members.get(replica) == incarnation

    def _held(self, replica: int) -> OpenTicket | None:
        """Return the ticket that a replica is working on."""
        return next((t for t in self._tickets.values() if t.replica == replica and not t.pushed), None)

    def _return(self, ticket: OpenTicket) -> None:
        """Take back a ticket that nobody will report, or nobody wants: its samples are free again."""
        self._tickets.pop(ticket.work.ticket, None)
        step = self._open
        if step is None or ticket not in step.tickets:
            self.open_books.give_back(ticket)
            return
        if not step.return_ticket(ticket):
            self.open_books.give_back(ticket)
        if not step.tickets:
            self._dissolve(step)  # the next who asks opens it again, for those who are there then

    def _dissolve(self, step: OpenStep) -> None:
        self._open = None
        for _, runs in step.parts:
            self.book(step.chapter).give_back(step.epoch, runs)

    def _can_help(self, chapter: int, epoch: int) -> list[int]:
        return self._members.can_help(chapter, epoch, self.open_books.finished)

    # ── chapters ─────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, number: int, length: int, batch_size: int, left_out: int) -> None:
        """A replica is about to ask for samples of chapter `number`."""
        self.open_books.begin(number, length, batch_size, left_out)

    def book(self, chapter: int) -> Book:
        return self.open_books.book(chapter)

    # ── tickets ──────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, replica: int, chapter: int, stop_epoch: int, now: float) -> Work | Wait | End:
        """Return what `replica` shall do next in its chapter, all epochs before `stop_epoch`."""
        self._members.check(replica)
        if chapter < self.open_books.first_chapter:
            return End()
        self._members.places[replica] = (chapter, stop_epoch)
        self._pace.is_back(replica, now)
        held = self._held(replica)
        if held is not None:
            if held.chapter == chapter:
                return held.work  # its answer was lost on the way
            self._return(held)  # the script has gone on without it
        step = self._open
        if step is not None and not self._can_help(step.chapter, step.epoch):
            self._dissolve(step)  # everybody has gone on
            for ticket in step.tickets:
                self._too_late(ticket)
        return self._answer(replica, chapter, stop_epoch, now)

    def give_back(self, replica: int, number: int) -> None:
        """Take back a ticket that its holder does not compute now: others may need the samples."""
        held = self._held(replica)
        if held is not None and held.work.ticket == number:
            self._return(held)

    def _answer(self, replica: int, chapter: int, stop_epoch: int, now: float) -> Work | Wait | End:
        book = self.book(chapter)
        if self.stopping and self._open is None:
            return Wait("the servers to update") if self._closing or self._reported else End(stop=True)
        if book.finished(stop_epoch):
            return End()
        if self._warming_up(chapter):
            first = min(self._can_help(chapter, stop_epoch - 1))
            if replica != first:
                return Wait(f"the warm-up on replica {first}")
        if self.rule.is_async:
            return self._ask_async(self.rule, replica, chapter, stop_epoch, now)
        return self._ask_sync(self.rule, replica, chapter, stop_epoch, now)

    def _warming_up(self, chapter: int) -> bool:
        if self.step < self._warmup_steps:
            return True
        return chapter == 0 and not self.book(0).finished(self._warmup_epochs)

    def _ask_async(self, rule: Async, replica: int, chapter: int, stop_epoch: int, now: float) -> Work | Wait | End:
        if any(ticket.replica == replica for ticket in self._tickets.values()):
            return Wait("the servers to update")
        if rule.bound is not None and not self._warming_up(chapter):
            slowest, steps = self._members.behind(replica)
            if steps > rule.bound:
                return Wait(f"replica {slowest}, which is {steps} steps behind")
        book = self.book(chapter)
        taken = self._reservations.take(replica, chapter, stop_epoch) or book.take(book.batch_size, stop_epoch)
        if taken is None:
            self._reservations.cancel_all()
            taken = book.take(book.batch_size, stop_epoch)
        if taken is None:
            return Wait("samples that other replicas have not finished")
        epoch, runs = taken
        following = self._reservations.make(replica, chapter, book.batch_size, stop_epoch)
        ticket = self._hand_out(replica, chapter, epoch, runs, part=0, exact=False, now=now, following=following)
        return ticket.work

    def _ask_sync(self, rule: Sync, replica: int, chapter: int, stop_epoch: int, now: float) -> Work | Wait | End:
        if self._closing is not None:
            return Wait("the servers to update")
        step = self._open
        if step is None:
            if self._members.any_before(chapter, self.open_books.finished):
                return Wait("replicas that are in an earlier part of the script")
            step = self._open_step(rule, chapter, stop_epoch, now)
        if step is None:
            return Wait("samples that other replicas have not finished")
        if step.chapter != chapter or step.epoch >= stop_epoch:
            return Wait("replicas that are in another part of the script")
        if step.of(replica) is not None:
            # Of a process that has died since, else this one would wait for the outcome.
            return self.more(replica, now) or Wait(step.waits_for(self.members))
        if step.parts:
            helpers = self._can_help(chapter, step.epoch)
            if step.exact:  # the same part of every batch: it has loaded that meanwhile
                step.put_first(sorted(helpers).index(replica))
            share = step.share(len(helpers), others=len(step.without_ticket(helpers)) - 1)
            part, runs = step.take_parts(max(1, share))
        elif step.exact:
            return Wait("the step after this one")  # it has joined in the middle of a step
        else:
            taken = self.book(chapter).take(step.size, stop_epoch, only_epoch=step.epoch)
            if taken is None:
                return Wait(step.waits_for(self.members))
            part, runs = step.next_part, taken[1]
            step.next_part += 1
        ticket = self._hand_out(replica, chapter, step.epoch, runs, part, exact=step.exact, now=now)
        step.tickets.append(ticket)
        return ticket.work

    def more(self, replica: int, now: float) -> Work | None:
        """More work for one that has reported and waits for its step: somebody has died, and the step lacks its part.

        It is computed together with the replica's own, which it takes the place of.
        """
        step = self._open
        own = step.of(replica) if step is not None else None
        if step is None or own is None or not own.pushed or replica not in self.members:
            return None
        helpers = self._can_help(step.chapter, step.epoch)
        share = step.share(len(helpers), others=len(step.without_ticket(helpers)))
        if not share:
            return None
        _, runs = step.take_parts(share)
        self._tickets.pop(own.work.ticket)
        step.drop_reported(own)
        both = tuple(merged([*own.work.runs, *runs]))
        again = self._hand_out(replica, step.chapter, step.epoch, both, own.work.part, exact=True, now=now)
        step.tickets.append(again)
        return again.work

    def _open_step(self, rule: Sync, chapter: int, stop_epoch: int, now: float) -> OpenStep | None:
        book = self.book(chapter)
        taken = book.take(book.batch_size, stop_epoch)
        if taken is None:
            return None
        epoch, runs = taken
        among = self._can_help(chapter, epoch)
        count = 1 if self._warming_up(chapter) else len(among)
        accept = 1 if count == 1 else self._accept(rule, among, now)
        self._open = OpenStep.over(chapter, epoch, runs, accept, count)
        return self._open

    def _accept(self, rule: Sync, among: Sequence[int], now: float) -> int:
        if rule.accept == "auto":
            return self._pace.choose(among, self.step, now)
        return min(rule.accept, len(among)) if isinstance(rule.accept, int) else len(among)

    @property
    def accepting(self) -> int:
        """Return how many replicas' gradients make a step now."""
        if self._open is not None:
            return self._open.accept
        if self.rule.is_async:
            return 1
        wanted = self._pace.chosen if self.rule.accept == "auto" else self.rule.accept
        return min(wanted, len(self.members)) if isinstance(wanted, int) else len(self.members)

    def _hand_out(
        self,
        replica: int,
        chapter: int,
        epoch: int,
        runs: Runs,
        part: int,
        *,
        exact: bool,
        now: float,
        following: tuple[int, Runs] | None = None,
    ) -> OpenTicket:
        work = Work(self._next_ticket, self.step, self.version, epoch, runs, part, exact, following)
        self._next_ticket += 1
        ticket = OpenTicket(work, replica, chapter, now, not self.rule.is_async)
        self._tickets[work.ticket] = ticket
        return ticket

    # ── reports and steps ────────────────────────────────────────────────────────────────────────────────

    def report(self, replica: int, number: int, pulled: int, loss: LossPart, now: float) -> None:
        """`replica` has left the gradient of that ticket with the servers."""
        if self._pace.late_ticket(replica) == number:
            self._pace.is_back(replica, now)
        ticket = self._tickets.get(number)
        if ticket is None or ticket.replica != replica or ticket.pushed:
            return  # told before, or settled meanwhile: `outcome` says how
        self._pace.took(ticket, now)
        ticket.pushed, ticket.pulled, ticket.loss = True, pulled, loss
        if self.rule.is_async:
            self._reported.append(ticket)
            if not self._warming_up(ticket.chapter):  # the others cannot keep up with that
                self._members.has_reported(replica)
        elif self._open is not None and ticket in self._open.tickets:
            self._open.reported.append(ticket)
        else:
            self._too_late(ticket)  # handed out under another rule

    def next_close(self) -> Close | None:
        """Return the step that can be made now. `closed` has to follow before there is another."""
        if self._closing is not None:
            return None
        if self.rule.is_async:
            return self._close_async(self.rule)
        step = self._open
        if step is None:
            return None
        first = step.enough(partial(self._spares, step))
        if not first:
            return None
        self._dissolve(step)
        for ticket in step.tickets:
            if ticket not in first:
                self._too_late(ticket)
        return self._begin_closing(first)

    def _spares(self, step: OpenStep) -> int:
        free = self.book(step.chapter).free(step.epoch)
        return step.spares(self._can_help(step.chapter, step.epoch), free)

    def _close_async(self, rule: Async) -> Close | None:
        while self._reported:
            ticket = self._reported.popleft()
            staleness = ticket.staleness(self.version)
            if staleness > rule.drop_beyond:
                self.open_books.count_staleness(staleness)
                self.open_books.dropped += 1
                self._settle_without_step(ticket)
                self._return(ticket)
                continue
            # One that was handed out under a sync rule was not computed on a copy which could be compared.
            compensation = 0.0 if ticket.sync else rule.compensation
            return self._begin_closing([ticket], rule, compensation)
        return None

    def _begin_closing(
        self, tickets: Sequence[OpenTicket], rule: Async | None = None, compensation: float = 0.0
    ) -> Close:
        self._closing = close_of(self.version, tickets, rule, compensation)
        return self._closing

    def closed(self, close: Close) -> None:
        """Count a step that all servers have made."""
        assert self._closing is close
        self._closing = None
        self.open_books.count(close)
        for accepted in close.accepted:
            self._tickets.pop(accepted.ticket, None)

    def replay(self, close: Close, length: int, batch_size: int, left_out: int) -> None:
        """Count a step that is in the log: made before this process began. The log may begin before what was loaded."""
        self.open_books.count_again(close, length, batch_size, left_out)
        self._next_ticket = max(self._next_ticket, 0, *(accepted.ticket + 1 for accepted in close.accepted))

    def _too_late(self, ticket: OpenTicket) -> None:
        self.open_books.late += 1
        self._tickets.pop(ticket.work.ticket, None)
        self.open_books.give_back(ticket)
        if ticket.pushed:
            self._settle_without_step(ticket)
        else:  # its holder may still have to hear what became of the one before
            self._pace.is_late(ticket)

    def _settle_without_step(self, ticket: OpenTicket) -> None:
        self.open_books.settle(ticket.replica, ticket.work.ticket, None)

    def outcome(self, replica: int, number: int) -> Outcome | None:
        """Return what became of a ticket that was reported; None while that is open."""
        ticket = self._tickets.get(number)
        return None if ticket is not None and ticket.replica == replica else self.open_books.outcome(replica, number)

    def set_rule(self, rule: Rule) -> None:
        """Close steps by `rule` from now on."""
        if rule == self.rule:
            return
        changed, self.rule = type(rule) is not type(self.rule), rule
        self._members.forget_reports()
        if not changed:
            return
        self._reservations.cancel_all()
        step = self._open
        if step is not None:
            self._dissolve(step)
            self._reported.extend(step.reported)
        while self._reported and not rule.is_async:
            self._too_late(self._reported.popleft())

    @property
    def open_step(self) -> OpenStep | None:
        """Return the step that is being computed, under a sync rule."""
        return self._open

    def waits(self, replica: int) -> str:
        """Return what a replica that has reported waits for, in words."""
        return self._open.waits_for(self.members) if self._open is not None else "the servers to update"

    def ask_task(self, replica: int, key: TaskKey, length: int) -> tuple[int, Runs] | Wait | list[float]:
        """Return a part of a task that this replica is to do, or what came of it."""
        self._members.check(replica)
        return self.tasks.ask(replica, key, length, len(self.members))

    # ── as a value ───────────────────────────────────────────────────────────────────────────────────────

    def books(self) -> Books:
        """Return everything but who is there and what they hold."""
        results = list(self.tasks.results.items())
        return msgspec.structs.replace(self.open_books.state(), next_ticket=self._next_ticket, results=results)

    def load(self, books: Books) -> None:
        """Go on from these books; a task that was done before is still done. What was handed out before is over."""
        self.open_books.load(books)
        self._tickets.clear()
        self._reported.clear()
        self._open = None
        self._next_ticket = max(self._next_ticket, books.next_ticket)
        self._reservations = Reservations(self.book)
        self.tasks.results |= dict(books.results)
