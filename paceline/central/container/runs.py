"""The runs that train one container, on the server that is its chief.

A container outlives a run, and one that comes when nobody trains it goes on with the books of the last one. Runs may
also train it at the same time, started by different people at different times:

    run A    books, tickets, replicas in places 0, 1 ──┐
    run B    books, tickets, a replica in place 2    ──┴─ parameters, optimizer state, version: the container's

Each is as if it were alone: it has its samples, epochs, steps and end, and what happens to it happens to no other. All
it sees of the others is that parameters change between its steps, which is counted as staleness. So all of them must
be async: a sync step is made of gradients of one version, and there would be others before it is.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec
import torch

from paceline.central.chief.books import Books
from paceline.central.container.bounds import MOST_PLACES, check_options
from paceline.central.container.buffers import ModelExtras
from paceline.central.container.chief_state import ChiefState
from paceline.central.container.closing import StepCloser
from paceline.central.container.container import Container
from paceline.central.container.presence import GRACE_S
from paceline.central.container.training import ContainerTraining
from paceline.central.messages.connection import Connection
from paceline.central.messages.notes import ChiefNotes
from paceline.central.messages.records import Made, MembersChanged, OfRun, RuleSet, TaskResult
from paceline.central.messages.settings import Settings
from paceline.central.shards import Spec
from paceline.errors import PacelineError

LEAVE_WITHIN_S = 3 * GRACE_S  # for replicas of another run, which may just be leaving
FILL_WITHIN_S = 30.0  # for another run that gives a new container its values
RETURN_WITHIN_S = 60.0  # for a run none of whose replicas is there: they may be being started again


class ContainerRuns:
    """Knows who trains a container."""

    def __init__(self, container: Container, others: Sequence[Connection], *, first_ticket: int = 1) -> None:
        """`others`: connections to the other servers. `first_ticket`: see `ChiefState`."""
        self.container = container
        self._first_ticket = first_ticket
        self._opening = threading.Lock()  # held while a run comes, which may take a while
        self.changed = threading.Condition()  # guards all below
        self._let_go: set[str] = set()  # runs none of whose replicas was there when another came
        self.extras = ModelExtras()
        self.closer = StepCloser(container, self.extras, self.changed, others)
        self._take([self._new(container.settings, 0)])

    def _take(self, runs: list[ContainerTraining]) -> None:
        self.all = runs  # in the order in which they came
        self.closer.runs = [run.state for run in runs]

    def _new(self, settings: Settings, first: int) -> ContainerTraining:
        state = ChiefState(self.container, self.changed, settings, first, self._first_ticket)
        return ContainerTraining(state, self.extras, self.closer)

    @property
    def latest(self) -> ContainerTraining:
        """Return the run that came last: if nobody is there, the books that the next one goes on with."""
        with self.changed:
            return self.all[-1]

    @property
    def living(self) -> list[ContainerTraining]:
        """Return those of which replicas are there."""
        with self.changed:
            return [run for run in self.all if run.presence.members]

    def find(self, name: str) -> ContainerTraining | None:
        with self.changed:
            return next((run for run in self.all if run.state.settings.run == name), None)

    def has_let_go(self, name: str, incarnation: int) -> bool:
        """Return whether a process that comes is a later one of a run that another has taken the place of: without its
        books it would begin anew."""
        with self.changed:
            return incarnation > 1 and name in self._let_go

    # ── a run comes ──────────────────────────────────────────────────────────────────────────────────────

    def open(self, spec: Spec, settings: Settings, addresses: Sequence[str], others: Sequence[Connection]) -> bool:
        """Let that run train the container too, or go on with it if nobody is at it; return whether it was not here.

        `others`: connections to the other servers, as it knows them.
        """
        with self._opening:
            if self.find(settings.run) is not None:
                return False  # another of its replicas was first
            with self.changed:
                alongside = self._await_turn(spec, settings, addresses)
                ended = [run for run in self.all if run not in alongside and (not alongside or _is_over(run))]
                for run in ended:
                    run.state.end()
                    self._let_go.add(run.state.settings.run)
                books = self.all[-1].state.chief.books()
                if not alongside:
                    self.closer.begin_run(others)
            self.closer.vacate([place for run in ended for place in run.state.places])
            with self.changed:
                self.container.reopen(spec, settings)
                kept = [run for run in self.all if run not in ended]
                run = self._new(settings, self._free_places(kept, settings.replicas))
                run.state.take_books(
                    Books(others=self.container.step) if alongside else _for_later_run(books, self.container.step)
                )
                self._take([*kept, run])
            return True

    def _await_turn(self, spec: Spec, settings: Settings, addresses: Sequence[str]) -> list[ContainerTraining]:
        """Wait until this run can go on; return those that it goes on alongside. With the lock held."""
        began = time.monotonic()
        while True:
            living = self.living
            if not living and not self.closer.busy:
                return []
            refusal, patience_s = self._refusal(living, spec, settings, addresses), LEAVE_WITHIN_S
            if living and refusal is None and not (filled := self._is_filled(living)):
                refusal, patience_s = "is being given its first values by another run: try again", FILL_WITHIN_S
            if living and refusal is None and filled and all(run.presence.certain for run in living):
                return living
            if refusal is None:
                refusal, patience_s = "is at a step that does not end: look after its servers", RETURN_WITHIN_S
            left = began + patience_s - time.monotonic()
            if left <= 0:
                raise PacelineError(f"container {self.container.name!r} {refusal}")
            self.changed.wait(left)

    def _refusal(
        self, living: Sequence[ContainerTraining], spec: Spec, settings: Settings, addresses: Sequence[str]
    ) -> str | None:
        """Return why a run cannot train what these are training, if it cannot."""
        if not living:
            return None
        replicas = ", ".join(str(replica) for run in living for replica in run.presence.members)
        busy = f"is being trained by another run, replicas {replicas}"
        sync = [run for run in living if not run.state.chief.rule.is_async]
        if sync or not settings.rule.is_async:
            whose = "which is sync" if sync else "and this one is sync"
            return (
                f"{busy}, {whose}: wait for its end, give another name, or have all runs in one container be async "
                "(--async, --bounded)"
            )
        if settings.durability != self.container.settings.durability:
            return f"{busy}, with --durability {self.container.settings.durability}: give the same"
        if settings.recording or self.container.settings.recording:
            return f"{busy}: paceline verify needs a container of its own"
        if list(addresses) != self.container.addresses:
            return f"{busy}, at {','.join(self.container.addresses)}: give the same addresses in the same order"
        try:
            check_options(spec.optimizer.groups, self.container.spec.optimizer.groups)
        except PacelineError as error:
            return f"{busy}, with other options: {error}"
        return None

    def _is_filled(self, living: Sequence[ContainerTraining]) -> bool:
        return self.container.filled and (self.container.reopened or any(run.has_filled for run in living))

    def _free_places(self, runs: Sequence[ContainerTraining], replicas: int) -> int:
        first = 0
        for taken in sorted((run.state.places for run in runs), key=lambda places: places.start):
            if first + replicas <= taken.start:
                break
            first = taken.stop
        if first + replicas > MOST_PLACES:
            raise PacelineError(f"container {self.container.name!r} has no places for {replicas} more replicas")
        return first

    # ── all of them ──────────────────────────────────────────────────────────────────────────────────────

    def look_for_missing(self) -> None:
        """Called now and then: whoever has not come back in time has left."""
        for run in list(self.all):
            run.look_for_missing()

    def expect_no_more(self, replica: int, incarnation: int | None) -> None:
        """The process of that replica has ended, perhaps before it has come here; None: and no other will come."""
        for run in list(self.all):
            if run.presence.expects(replica, incarnation):
                run.leave(replica, incarnation or 0)

    def take_books(
        self, of: ContainerTraining, books: Books, values: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Have a run go on with other books, and new `values` of buffers, and of what is not trained."""
        of.check_alone("take over a checkpoint")
        with self.changed:
            of.state.take_books(books)
            self.closer.last = None
            for tensor, value in values:
                tensor.copy_(value)

    # ── the journal ──────────────────────────────────────────────────────────────────────────────────────

    def whole(self) -> tuple[dict[str, torch.Tensor], ChiefNotes]:
        """Return what a snapshot has of this, in memory of its own."""
        with self.changed:
            return self.extras.whole(), ChiefNotes(
                runs=[run.state.notes() for run in self.all],
                buffers=[name for name, _ in self.extras.buffers.tensors],
                frozen=[name for name, _ in self.extras.frozen],
                keys=self.extras.keys,
                last=self.closer.last,
            )

    def load(self, tensors: Mapping[str, torch.Tensor], notes: ChiefNotes) -> None:
        """Go on from a snapshot."""
        with self.changed:
            self.extras.load(tensors, notes)
            self.closer.last = notes.last
            self._take([self._new(run.settings, run.first) for run in notes.runs])
            for run, noted in zip(self.all, notes.runs, strict=True):
                run.state.load(noted)

    def again(self, record: Made | TaskResult | RuleSet | MembersChanged, body: memoryview) -> None:
        """What the journal has since the snapshot, once more."""
        with self.changed:
            place = record.first if isinstance(record, OfRun) else record.close.accepted[0].replica
            owner = next((run for run in self.all if place in run.state.places), None)
            if owner is None:
                raise PacelineError(f"place {place} of container {self.container.name!r} is of no run in the snapshot")
            owner.state.again(record)
            if isinstance(record, Made):
                for run in self.all:
                    if run is not owner:
                        run.state.chief.open_books.count_other(record.close.step + 1)
                self.closer.last = record
                self.extras.buffers.unpack(body)

    def go_on(self) -> None:
        """Take up the work of the process before."""
        for run in self.all:
            run.presence.expect_all_back()
        self.closer.repeat_last_step()


def _is_over(run: ContainerTraining) -> bool:
    return not run.presence.members and time.monotonic() - run.presence.left_at > RETURN_WITHIN_S


def _for_later_run(books: Books, version: int) -> Books:
    """Return the books that the next run goes on with. What was measured is still true; what was saved was so for
    another."""
    results = [(key, sums) for key, sums in books.results if key.holds_for_later_runs]
    return msgspec.structs.replace(books, results=results, others=version - books.step)


@dataclass(frozen=True)
class Share:
    """One server's share of a container; on the chief with the runs that train it."""

    container: Container
    runs: ContainerRuns | None = None

    def between_steps(self) -> AbstractContextManager[None]:
        """While nothing of it changes but by pushes: the parameters and the books are of the same step."""
        return self.runs.closer.between_steps() if self.runs is not None else contextlib.nullcontext()

    def close(self) -> None:
        """Give the memory back; whoever waits for the training fails."""
        if self.runs is not None:
            self.runs.closer.close()
        self.container.journal.renew = lambda: None  # it would hold on to the memory
        self.container.close()
