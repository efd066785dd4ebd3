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
close (`next_close`) after whatever may have changed something: ask, report, leave, a new rule.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from paceline.central.chief.books import Books
from paceline.central.chief.pace import Pace
from paceline.central.chief.reservations import Reservations
from paceline.central.chief.tasks import TaskKey, Tasks
from paceline.central.chief.tickets import Accepted, Close, End, OpenStep, OpenTicket, Outcome, Wait, Work
from paceline.data.book import Book, Runs, cut, merged
from paceline.errors import CheckpointError, DataError, PacelineError
from paceline.rules import Async, Rule, Sync


class Chief:
    """The bookkeeping of one container's training."""

    def __init__(
        self, rule: Rule, replicas: int, *, warmup_steps: int = 0, warmup_epochs: int = 0, first_ticket: int = 1
    ) -> None:
        """`first_ticket`: a chief that follows one that has died gives a number above all that one can have used."""
        self.rule = rule
        self.step = 0  # closed so far: the version of the parameters
        self.members: dict[int, int] = dict.fromkeys(range(replicas), 0)  # incarnations; 0: expected, not yet seen
        self.staleness: dict[int, int] = {}  # how many gradients had which
        self.late = self.dropped = 0
        self.stopping = False
        self.last = Outcome(None, 0.0, 0)
        self.tasks = Tasks()  # between steps
        self._incarnations: dict[int, int] = {}  # the newest of each replica
        self._warmup_steps, self._warmup_epochs = warmup_steps, warmup_epochs
        self._chapters: dict[int, Book] = {}
        self._tickets: dict[int, OpenTicket] = {}  # neither accepted nor given back
        self._outcomes: dict[int, tuple[int, Outcome]] = {}  # by replica: its last ticket that was settled
        self._next_ticket = first_ticket
        self._open: OpenStep | None = None
        self._reported: deque[OpenTicket] = deque()  # async: in order of arrival
        self._promises = Reservations(self.book)
        self._closing: tuple[Close, list[OpenTicket]] | None = None
        self._places: dict[int, tuple[int, int]] = {}  # chapter and stop_epoch that each asked for last
        self._clocks: dict[int, int] = {}  # how many async tickets each replica has reported
        self._pace = Pace()
        self._first_chapter = 0  # earlier ones were finished before the run was resumed

    # ── members ──────────────────────────────────────────────────────────────────────────────────────────

    def join(self, replica: int, incarnation: int) -> None:
        """A process takes the place of `replica`. An older process in that place is not listened to any more."""
        newest = self._incarnations.get(replica, 0)
        if incarnation < newest:
            raise PacelineError(f"replica {replica} was started again since: this process no longer takes part")
        if incarnation > newest:
            self.leave(replica, newest)
        self._incarnations[replica] = incarnation
        self.members[replica] = incarnation
        # Who joins late is as far as the slowest: it must not hold up those who are bounded by it.
        others = [self._clocks.get(member, 0) for member in self.members if member != replica]
        self._clocks[replica] = max(self._clocks.get(replica, 0), min(others, default=0))

    def leave(self, replica: int, incarnation: int | None = None) -> None:
        """That process has ended: its samples return. What it has pushed is still good."""
        if incarnation is not None and self.members.get(replica, incarnation) not in (0, incarnation):
            return
        if self.members.pop(replica, None) is None:
            return
        held = self._held(replica)
        if held is not None:
            self._return(held)
        self._promises.break_off(replica)
        self._places.pop(replica, None)  # the next process in that place may be elsewhere
        self._pace.leave(replica)
        self.tasks.leave(replica)

    def is_member(self, replica: int, incarnation: int) -> bool:
        return self.members.get(replica) == incarnation

    def _held(self, replica: int) -> OpenTicket | None:
        """The ticket that a replica is working on."""
        return next((t for t in self._tickets.values() if t.replica == replica and not t.pushed), None)

    def _return(self, ticket: OpenTicket) -> None:
        """Nobody will report this ticket, or nobody wants it: its samples are free again."""
        self._tickets.pop(ticket.work.ticket, None)
        step = self._open
        if step is not None and ticket in step.tickets:
            step.tickets.remove(ticket)  # it was not reported, for those stay
            if step.exact:
                step.parts.appendleft((ticket.work.part, ticket.work.runs))
            else:
                self._give_back(ticket)
            if not step.tickets:
                self._dissolve(step)  # the next who asks opens it again, for those who are there then
        else:
            self._give_back(ticket)

    def _dissolve(self, step: OpenStep) -> None:
        self._open = None
        for _, runs in step.parts:
            self._chapters[step.chapter].give_back(step.epoch, runs)

    def _give_back(self, ticket: OpenTicket) -> None:
        self._chapters[ticket.chapter].give_back(ticket.work.epoch, ticket.work.runs)

    def _finished(self, place: tuple[int, int]) -> bool:
        return self._chapters[place[0]].finished(place[1])

    def _can_help(self, chapter: int, epoch: int) -> list[int]:
        """Members that are not known to be at a place of the script where they cannot work on that epoch."""
        found = []
        for member in self.members:
            place = self._places.get(member, (chapter, epoch + 1))
            there = chapter >= place[0] if self._finished(place) else chapter == place[0] and epoch < place[1]
            if there:
                found.append(member)
        return found

    def _can_take(self, step: OpenStep) -> list[int]:
        """Members that may ask for a part of the open step."""
        taken = {ticket.replica for ticket in step.tickets}
        return [member for member in self._can_help(step.chapter, step.epoch) if member not in taken]

    # ── chapters ─────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, number: int, length: int, batch_size: int, left_out: int) -> None:
        """A replica is about to ask for samples of chapter `number`."""
        if number < self._first_chapter:
            return
        book = self._chapters.get(number)
        if book is None:
            self._chapters[number] = Book(length, batch_size=batch_size, left_out=left_out)
        elif book.length != length:
            raise DataError("dataset length", length, f"another replica has {book.length} samples; give all the same")
        else:
            book.batch_size = batch_size
            book.leave_out(left_out)

    def book(self, chapter: int) -> Book:
        return self._chapters[chapter]

    # ── tickets ──────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, replica: int, chapter: int, stop_epoch: int, now: float) -> Work | Wait | End:
        """What `replica` shall do next in its chapter, all epochs before `stop_epoch`."""
        self._must_be_member(replica)
        if chapter < self._first_chapter:
            return End()
        self._places[replica] = (chapter, stop_epoch)
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
        """It does something else before it computes that ticket: others may need the samples."""
        held = self._held(replica)
        if held is not None and held.work.ticket == number:
            self._return(held)

    def _must_be_member(self, replica: int) -> None:
        if replica not in self.members:
            # A ticket that it got now would never return.
            raise PacelineError(f"replica {replica} was taken off the list: it has to join before it takes part")

    def _answer(self, replica: int, chapter: int, stop_epoch: int, now: float) -> Work | Wait | End:
        book = self._chapters[chapter]
        if self.stopping and self._open is None:
            return Wait("the servers to update") if self._closing or self._reported else End(stop=True)
        if book.finished(stop_epoch):
            return End()
        if self._warming_up(chapter):
            first = min(self._can_help(chapter, stop_epoch - 1))
            if replica != first:
                return Wait(f"the warm-up on replica {first}")
        if isinstance(self.rule, Async):
            return self._ask_async(self.rule, replica, chapter, stop_epoch, now)
        return self._ask_sync(self.rule, replica, chapter, stop_epoch, now)

    def _warming_up(self, chapter: int) -> bool:
        if self.step < self._warmup_steps:
            return True
        return chapter == 0 and not self._chapters[0].finished(self._warmup_epochs)

    def _ask_async(self, rule: Async, replica: int, chapter: int, stop_epoch: int, now: float) -> Work | Wait | End:
        if any(ticket.replica == replica for ticket in self._tickets.values()):
            return Wait("the servers to update")
        if rule.bound is not None and not self._warming_up(chapter):
            slowest = min(self.members, key=lambda member: self._clocks.get(member, 0))
            ahead = self._clocks.get(replica, 0) - self._clocks.get(slowest, 0)
            if ahead > rule.bound:
                return Wait(f"replica {slowest}, which is {ahead} steps behind")
        book = self._chapters[chapter]
        taken = self._promises.keep(replica, chapter, stop_epoch) or book.take(book.batch_size, stop_epoch)
        if taken is None:
            self._promises.break_all()
            taken = book.take(book.batch_size, stop_epoch)
        if taken is None:
            return Wait("samples that other replicas have not finished")
        epoch, runs = taken
        following = self._promises.make(replica, chapter, book.batch_size, stop_epoch)
        ticket = self._hand_out(replica, chapter, epoch, runs, part=0, exact=False, now=now, following=following)
        return ticket.work

    def _ask_sync(self, rule: Sync, replica: int, chapter: int, stop_epoch: int, now: float) -> Work | Wait | End:
        if self._closing is not None:
            return Wait("the servers to update")
        step = self._open
        if step is None:
            places = [self._places[member] for member in self.members if member in self._places]
            if any(place[0] < chapter and not self._finished(place) for place in places):
                return Wait("replicas that are in an earlier part of the script")
            step = self._open_step(rule, chapter, stop_epoch, now)
        if step is None:
            return Wait("samples that other replicas have not finished")
        if step.chapter != chapter or step.epoch >= stop_epoch:
            return Wait("replicas that are in another part of the script")
        if step.of(replica) is not None:
            # Of a process that has died since, else this one would wait for the outcome.
            return self.more(replica, now) or Wait(self._whom_the_step_waits_for(step))
        if step.parts:
            if step.exact:
                self._usual_part_first(step, replica)
            part, runs = self._take_parts(step, max(1, self._share(step, others=len(self._can_take(step)) - 1)))
        elif step.exact:
            return Wait("the step after this one")  # it has joined in the middle of a step
        else:
            taken = self._chapters[chapter].take(step.size, stop_epoch, only_epoch=step.epoch)
            if taken is None:
                return Wait(self._whom_the_step_waits_for(step))
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
        share = self._share(step, others=len(self._can_take(step)))
        if not share:
            return None
        _, runs = self._take_parts(step, share)
        self._tickets.pop(own.work.ticket)
        step.tickets.remove(own)
        step.reported.remove(own)
        both = tuple(merged([*own.work.runs, *runs]))
        again = self._hand_out(replica, step.chapter, step.epoch, both, own.work.part, exact=True, now=now)
        step.tickets.append(again)
        return again.work

    def _share(self, step: OpenStep, others: int) -> int:
        """How many parts one replica should take of those for which there are not enough `others`."""
        if not step.exact:
            return 0
        helpers = max(1, len(self._can_help(step.chapter, step.epoch)))
        return max(0, min(len(step.parts) - others, -(-len(step.parts) // helpers)))

    def _usual_part_first(self, step: OpenStep, replica: int) -> None:
        """A replica gets the same part of every batch, if it is there: it has loaded that meanwhile."""
        usual = sorted(self._can_help(step.chapter, step.epoch)).index(replica)
        for at, entry in enumerate(step.parts):
            if entry[0] == usual:
                del step.parts[at]
                step.parts.appendleft(entry)
                return

    def _take_parts(self, step: OpenStep, number: int) -> tuple[int, Runs]:
        taken = [step.parts.popleft() for _ in range(number)]
        return taken[0][0], tuple(merged(run for _, runs in taken for run in runs))

    def _open_step(self, rule: Sync, chapter: int, stop_epoch: int, now: float) -> OpenStep | None:
        book = self._chapters[chapter]
        taken = book.take(book.batch_size, stop_epoch)
        if taken is None:
            return None
        epoch, runs = taken
        among = self._can_help(chapter, epoch)
        count = 1 if self._warming_up(chapter) else len(among)
        accept = 1 if count == 1 else self._accept(rule, among, now)
        size = max(1, -(-sum(map(len, runs)) // accept))
        parts = deque((part, piece) for part, piece in enumerate(cut(runs, accept)) if piece)
        self._open = OpenStep(chapter, epoch, size, len(parts), accept == count, parts, next_part=len(parts))
        return self._open

    def _accept(self, rule: Sync, among: Sequence[int], now: float) -> int:
        if rule.accept == "auto":
            return self._pace.choose(among, self.step, now)
        return min(rule.accept, len(among)) if isinstance(rule.accept, int) else len(among)

    @property
    def accepting(self) -> int:
        """How many replicas' gradients make a step now."""
        if self._open is not None:
            return self._open.accept
        if isinstance(self.rule, Async):
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
        work = Work(self._next_ticket, self.step, epoch, runs, part, exact, following)
        self._next_ticket += 1
        ticket = OpenTicket(work, replica, chapter, now, isinstance(self.rule, Sync))
        self._tickets[work.ticket] = ticket
        return ticket

    def _whom_the_step_waits_for(self, step: OpenStep) -> str:
        missing = sorted(ticket.replica for ticket in step.tickets if not ticket.pushed)
        idle = sorted(set(self.members) - {ticket.replica for ticket in step.tickets})
        return "replicas " + ", ".join(map(str, missing or idle)) if missing or idle else "the servers to update"

    # ── reports and steps ────────────────────────────────────────────────────────────────────────────────

    def report(self, replica: int, number: int, pulled: int, loss: float, now: float) -> None:
        """`replica` has left the gradient of that ticket with the servers."""
        if self._pace.late_ticket(replica) == number:
            self._pace.is_back(replica, now)
        ticket = self._tickets.get(number)
        if ticket is None or ticket.replica != replica or ticket.pushed:
            return  # told before, or settled meanwhile: `outcome` says how
        self._pace.took(ticket, now)
        ticket.pushed, ticket.pulled, ticket.loss = True, pulled, loss
        if isinstance(self.rule, Async):
            self._reported.append(ticket)
            if not self._warming_up(ticket.chapter):  # the others cannot keep up with that
                self._clocks[replica] = self._clocks.get(replica, 0) + 1
        elif self._open is not None and ticket in self._open.tickets:
            self._open.reported.append(ticket)
        else:
            self._too_late(ticket)  # handed out under another rule

    def next_close(self) -> Close | None:
        """The step that can be made now. `closed` has to follow before there is another."""
        if self._closing is not None:
            return None
        if isinstance(self.rule, Async):
            return self._close_async(self.rule)
        step = self._open
        if step is None:
            return None
        coming = len(step.tickets) - len(step.reported)
        if step.exact:
            if step.parts or coming or not step.reported:
                return None
            first = step.reported
        else:
            free = self._chapters[step.chapter].free(step.epoch)
            to_take = min(len(self._can_take(step)), len(step.parts) + -(-free // step.size))
            first = step.reported[: step.accept]
            if not first or len(first) < min(step.accept, len(first) + coming + to_take):
                return None
        self._dissolve(step)
        for ticket in step.tickets:
            if ticket not in first:
                self._too_late(ticket)
        return self._begin_closing(first, lr=1.0, compensation=0.0, weigh=None)

    def _close_async(self, rule: Async) -> Close | None:
        while self._reported:
            ticket = self._reported.popleft()
            staleness = self._staleness(ticket)
            if staleness > rule.drop_beyond:
                self.staleness[staleness] = self.staleness.get(staleness, 0) + 1
                self.dropped += 1
                self._settle(ticket, None)
                self._return(ticket)
                continue
            # One that was handed out under a sync rule was not computed on a copy which could be compared.
            compensation = 0.0 if ticket.sync else rule.compensation
            return self._begin_closing([ticket], lr=rule.lr, compensation=compensation, weigh=rule)
        return None

    def _staleness(self, ticket: OpenTicket) -> int:
        return max(0, self.step - ticket.pulled)

    def _begin_closing(
        self, tickets: Sequence[OpenTicket], *, lr: float, compensation: float, weigh: Async | None
    ) -> Close:
        ordered = sorted(tickets, key=lambda ticket: (ticket.work.epoch, ticket.work.runs[0].start))
        samples = sum(ticket.samples for ticket in ordered)
        accepted = [
            Accepted(
                ticket=ticket.work.ticket,
                replica=ticket.replica,
                weight=ticket.samples / samples * (weigh.weight(self._staleness(ticket)) if weigh else 1.0),
                samples=ticket.samples,
                staleness=self._staleness(ticket),
                epoch=ticket.work.epoch,
                runs=[(run.start, run.stop) for run in ticket.work.runs],
            )
            for ticket in ordered
        ]
        loss = math.fsum(ticket.loss * ticket.samples for ticket in ordered) / samples
        close = Close(self.step, ordered[0].chapter, samples, loss, accepted, lr, compensation)
        self._closing = (close, ordered)
        return close

    def closed(self, close: Close) -> None:
        """All servers have made that step."""
        assert self._closing is not None
        assert self._closing[0] is close
        tickets, self._closing = self._closing[1], None
        self.step += 1
        self.last = Outcome(None, close.loss, close.samples)
        for ticket, accepted in zip(tickets, close.accepted, strict=True):
            self._tickets.pop(ticket.work.ticket, None)
            self._chapters[ticket.chapter].commit(ticket.work.epoch, ticket.work.runs)
            self.staleness[accepted.staleness] = self.staleness.get(accepted.staleness, 0) + 1
            self._settle(ticket, close.step)

    def replay(self, close: Close, length: int, batch_size: int, left_out: int) -> None:
        """Count a step that is in the log: made before this process began. The log may begin before what was loaded."""
        if close.step < self.step:
            return
        if close.step > self.step:
            raise CheckpointError(f"the log lacks step {self.step}: it goes on with step {close.step}")
        self.begin(close.chapter, length, batch_size, left_out)
        book = self._chapters[close.chapter]
        for accepted in close.accepted:
            runs = [range(start, stop) for start, stop in accepted.runs]
            book.take_these(accepted.epoch, runs)
            book.commit(accepted.epoch, runs)
            self._next_ticket = max(self._next_ticket, accepted.ticket + 1)
            outcome = Outcome(close.step, close.loss, close.samples)
            self._outcomes[accepted.replica] = (accepted.ticket, outcome)
            self.staleness[accepted.staleness] = self.staleness.get(accepted.staleness, 0) + 1
        self.step = close.step + 1
        self.last = Outcome(None, close.loss, close.samples)

    def _too_late(self, ticket: OpenTicket) -> None:
        self.late += 1
        self._tickets.pop(ticket.work.ticket, None)
        self._give_back(ticket)
        if ticket.pushed:
            self._settle(ticket, None)
        else:  # its holder may still have to hear what became of the one before
            self._pace.is_late(ticket)

    def _settle(self, ticket: OpenTicket, step: int | None) -> None:
        self._outcomes[ticket.replica] = (ticket.work.ticket, Outcome(step, self.last.loss, self.last.samples))

    def outcome(self, replica: int, number: int) -> Outcome | None:
        """What became of a ticket that was reported; None while that is open."""
        ticket = self._tickets.get(number)
        if ticket is not None and ticket.replica == replica:
            return None
        settled, outcome = self._outcomes.get(replica, (None, None))
        if settled == number and outcome is not None:
            return outcome
        return Outcome(None, self.last.loss, self.last.samples)  # given back while it was on its way

    def set_rule(self, rule: Rule) -> None:
        """From now on steps close by `rule`."""
        if rule == self.rule:
            return
        changed, self.rule = type(rule) is not type(self.rule), rule
        self._clocks.clear()  # a bound is on what comes now
        if not changed:
            return
        self._promises.break_all()
        step = self._open
        if step is not None:
            self._dissolve(step)
            self._reported.extend(step.reported)
        while self._reported and isinstance(rule, Sync):
            self._too_late(self._reported.popleft())

    def waits(self, replica: int) -> str:
        """What a replica that has reported waits for, in words."""
        return self._whom_the_step_waits_for(self._open) if self._open is not None else "the servers to update"

    def ask_task(self, replica: int, key: TaskKey, length: int) -> tuple[int, Runs] | Wait | list[float]:
        """A part of a task that this replica is to do, or what came of it."""
        self._must_be_member(replica)
        return self.tasks.ask(replica, key, length, len(self.members))

    # ── as a value ───────────────────────────────────────────────────────────────────────────────────────

    def books(self) -> Books:
        """Everything but who is there and what they hold."""
        return Books(
            step=self.step,
            next_ticket=self._next_ticket,
            first_chapter=self._first_chapter,
            chapters={number: book.state() for number, book in self._chapters.items()},
            results=list(self.tasks.results.items()),
            staleness=dict(self.staleness),
            late=self.late,
            dropped=self.dropped,
            last=self.last,
            outcomes=dict(self._outcomes),
        )

    def load(self, books: Books) -> None:
        """Go on from these books; a task that was done before is still done."""
        self.step, self._next_ticket = books.step, max(self._next_ticket, books.next_ticket)
        self._first_chapter = books.first_chapter
        self._chapters = {number: Book.load(chapter) for number, chapter in books.chapters.items()}
        self._promises = Reservations(self.book)
        self.tasks.results |= dict(books.results)
        self.staleness = dict(books.staleness)
        self.late, self.dropped = books.late, books.dropped
        self.last, self._outcomes = books.last, dict(books.outcomes)
