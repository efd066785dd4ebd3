"""Closing steps: what the chief decides is done on all servers, one step at a time.

Whichever thread finds that a step can be closed makes it, with all servers, while the others wait. Of several runs each
has its turn. What is decided is in the journal before anybody acts on it: a process that follows this one decides the
same.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from paceline.central.chief.tickets import Close
from paceline.central.container.buffers import ModelExtras
from paceline.central.container.chief_state import ChiefState
from paceline.central.container.container import Container
from paceline.central.jobs import together
from paceline.central.messages.connection import Connection
from paceline.central.messages.records import Made, packed
from paceline.central.messages.replies import Copied, Done, SquaredNorm
from paceline.central.messages.requests import Apply, Copy, Drop, Freeze, Request, Thaw, Vacate
from paceline.central.shards import Option
from paceline.errors import LossError, PacelineError, Stalled

Options = Sequence[dict[str, Option]]


class StepCloser:
    """Has all servers do the same: steps, and copies of everything between two steps."""

    def __init__(
        self,
        container: Container,
        extras: ModelExtras,
        changed: threading.Condition,
        others: Sequence[Connection],
    ) -> None:
        """`others`: connections to the other servers."""
        self._container, self._extras = container, extras
        self._others = others
        self._changed = changed  # guards all below
        self.runs: Sequence[ChiefState] = ()  # that train the container, or did so last
        self.last: Made | None = None  # the last step that was decided, if there is a journal
        self._turns = 0  # that runs have had
        self.busy = False  # a step is being made, or everything is being copied
        self.behind = False  # another server may not have made the last step yet
        self._making = False  # a step is decided: the parameters may have it, and the books have not
        self._failure: BaseException | None = None
        self._copies = 0

    def check(self) -> None:
        """Raise what went wrong for good."""
        if self._failure is not None:
            raise PacelineError(str(self._failure)) from self._failure

    def fail(self, error: BaseException) -> None:
        """Nothing more can be done for this container."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def begin_run(self, others: Sequence[Connection]) -> None:
        """A run goes on alone, which knows the other servers under these addresses."""
        self.last = None
        self._disconnect()
        self._others = others

    def close_steps(self) -> None:
        """Make every step that can be made; one thread does, the others find it busy."""
        while True:
            with self._changed:
                if self.busy or self._failure is not None:
                    return
                found = self._next_close()
                if found is None:
                    self._changed.notify_all()  # somebody's ticket may have been dropped
                    return
                run, close = found
                self.busy = True
            failure: BaseException | None = None
            try:
                self._make(run, close)
            except BaseException as error:
                failure = error
            with self._changed:
                self.busy = self._making = False
                if failure is not None:
                    self._failure = failure
                else:
                    self._count(run, close)
                    if self._container.journal.due:
                        self._container.journal.renew()
                self._changed.notify_all()

    def _next_close(self) -> tuple[ChiefState, Close] | None:
        """Return the step that can be made now, and whose it is."""
        runs = self.runs
        for turn in range(self._turns, self._turns + len(runs)):
            run = runs[turn % len(runs)]
            try:
                close = run.chief.next_close() if run.failure is None else None
            except LossError as error:  # whoever has reported is told
                run.failure, close = error, None
            if close is not None:
                self._turns = (turn + 1) % len(runs)
                return run, close
        return None

    def _count(self, run: ChiefState, close: Close) -> None:
        """All servers have made that step."""
        self._extras.buffers.merge(close.moved(run.first))
        run.count(close)
        for other in self.runs:
            if other is not run:
                other.chief.open_books.count_other(close.step + 1)

    def _make(self, run: ChiefState, decided: Close) -> None:
        name, scale = self._container.name, 1.0
        close, options = decided.moved(run.first), run.options[decided.accepted[-1].replica]
        clip_norm = run.settings.clip_norm
        if clip_norm is not None:
            ask = Apply(container=name, close=close, options=list(options), measure=True)
            squared = self._on_all(ask, SquaredNorm, lambda: SquaredNorm(squared=self._container.squared_norm(close)))
            length = math.sqrt(math.fsum(measured.squared for measured in squared))
            scale = min(1.0, clip_norm / (length + 1e-6))
        if self._container.journal.keeps:
            chapter = run.chapters.get(close.chapter)
            made = Made(close=close, options=list(options), scale=scale, chapter=chapter)
            self._container.note(made, packed(self._extras.buffers.merged(close)))
            self._container.journal.flush()
            with self._changed:
                self._making, self.last = True, made
        apply = Apply(container=name, close=close, options=list(options), scale=scale)
        self._on_all(apply, Done, lambda: self._container.apply(close, options, scale, noted=True))

    def _on_all(self, request: Request, expected: type, own: Callable[[], object]) -> list[Any]:
        """Ask the same of every server at the same time, and return all answers; `own` is what this server does."""
        answers: list[object] = [None] * (1 + len(self._others))

        def here() -> None:
            answers[0] = own()

        def there(number: int, other: Connection) -> None:
            answers[number] = other.call(request, expected)

        together([here, *(partial(there, number, other) for number, other in enumerate(self._others, 1))])
        return answers

    # ── everything, as of one step ───────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """With the lock held, when the parameters and the books are of the same step."""
        with self._changed:
            while self._making:
                self._changed.wait()
            yield

    @contextlib.contextmanager
    def _instead_of_steps(self) -> Iterator[None]:
        """While no step is made."""
        timeout_s = self._container.settings.timeout_s
        give_up = time.monotonic() + timeout_s
        with self._changed:
            while self.busy:
                if not self._changed.wait(give_up - time.monotonic()):
                    raise Stalled(f"waited {timeout_s:g} s for step {self._container.step} to close")
            self.busy = True
        try:
            yield
        finally:
            with self._changed:
                self.busy = False
                self._changed.notify_all()
            self.close_steps()

    def freeze(self, run: ChiefState) -> Copied:
        """Have every server keep a copy of what it has, all after the same step, and the chief that run's books."""
        with self._instead_of_steps():
            with self._changed:
                self._copies += 1
                number, books = self._copies, run.chief.books()
            request = Freeze(container=self._container.name, number=number)
            self._on_all(request, Copied, lambda: self._container.freeze(number, self._extras.all, books))
            return Copied(number=number, step=self._container.step)

    def vacate(self, places: list[int]) -> None:
        """Have every server let go of the gradients in these places."""
        with self._instead_of_steps():
            self._extras.buffers.forget(places)
            request = Vacate(container=self._container.name, places=places)
            self._on_all(request, Done, lambda: self._container.vacate(places))

    def copy(self, run: ChiefState, to: str, take: Callable[[int], None], drop: Callable[[], None]) -> None:
        """Make another container on every server, with that run's books. `take` and `drop` are this server's part."""
        number, name = self.freeze(run).number, self._container.name
        try:
            self._on_all(Copy(container=name, to=to, number=number), Done, lambda: take(number))
        except BaseException:
            with contextlib.suppress(PacelineError):
                self._on_all(Drop(container=to, force=True), Done, drop)
            raise
        finally:
            self._on_all(Thaw(container=name, number=number), Done, lambda: self._container.thaw(number))

    # ── beginning and ending ─────────────────────────────────────────────────────────────────────────────

    def repeat_last_step(self) -> None:
        """Have the other servers make the last step of the process before this one, which may have died meanwhile.

        Nobody is answered before they have: who is told of a step may rely on it.
        """
        with self._changed:
            last = self.last
            if last is None or not self._others:
                return
            self.busy = self.behind = True
        threading.Thread(target=self._repeat, args=(last,), daemon=True).start()

    def _repeat(self, last: Made) -> None:
        apply = Apply(container=self._container.name, close=last.close, options=last.options, scale=last.scale)
        failure: BaseException | None = None
        try:
            self._on_all(apply, Done, Done)
        except BaseException as error:
            failure = error
        with self._changed:
            self._failure = self._failure or failure
            self.busy = self.behind = False
            self._changed.notify_all()
        self.close_steps()

    def close(self) -> None:
        self.fail(PacelineError(f"container {self._container.name!r} was dropped"))
        self._disconnect()

    def _disconnect(self) -> None:
        for other in self._others:
            other.close()
