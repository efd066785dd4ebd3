"""Runs a described step for some steps, with random compute times: how long it takes, what binds, what is wasted.

>>> from paceline.plan.servers_step import servers_step
>>> from paceline.plan.step import StepCost
>>> cost = StepCost.whole(compute_s=0.3, bytes=100e6)
>>> step = servers_step(cost, replicas=8, servers=2, link=1e9)
>>> found = simulate(step)
>>> f"{found.step_s:.3f} s a step, {found.turns_per_s:.1f} batches a second; {found.binds} binds"
"1.100 s a step, 7.3 batches a second; servers' link out binds"
>>> {kind: round(share, 2) for kind, share in found.path.items()}
{'compute': 0.27, 'exchange': 0.73}

Discrete events: the clock goes from one beginning or end of a piece to the next. What works in turn has a queue, in the
order in which pieces could begin: a core computes one thing at a time, and a connection carries one message after the
other. Links on which many meet are shared fairly (`fair_links`): with queues the first replica would have its gradient
through at once and begin its next turn early, which no network gives it, and staleness would come out too even.

Where nothing is random and everybody waits for everybody, one step says it all; that is exact.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from paceline.errors import InvalidInput
from paceline.plan.compute_times import ComputeTimes, Fixed
from paceline.plan.critical_path import CriticalPath
from paceline.plan.fair_links import FairLinks, leaves_and_others
from paceline.plan.simulated import ResourceUse, Simulated, Staleness
from paceline.plan.step import CLOSING, StepDescription

__all__ = ["ResourceUse", "Simulated", "Staleness", "simulate"]

_DRAWN_AT_ONCE = 4096


def simulate(
    step: StepDescription,
    *,
    times: ComputeTimes | None = None,
    steps: int = 30,
    seed: int = 0,
    slow: Mapping[int, float] | None = None,
    warm_up: int | None = None,
) -> Simulated:
    """Returns what a run of this step comes to.

    `slow`: by participant, a factor on all of its compute times. `warm_up`: how many steps come before those that are
    measured. Of async, `steps` are turns of every participant.
    """
    if steps < 1:
        raise InvalidInput("steps", steps, "give at least 1")
    if unknown := [number for number in slow or {} if not 0 <= number < step.participants]:
        raise InvalidInput("slow", unknown[0], f"give a replica from 0 to {step.participants - 1}")
    times = times or Fixed()
    if step.closes == "all":
        warm_up = warm_up or 0
        steps = 1 if isinstance(times, Fixed) else steps
    elif warm_up is None:
        warm_up = max(3, steps // 10)
    each = step.participants if step.closes == "each" else 1
    return _Run(step.check(), times, seed, dict(slow or {})).run(warm_up * each, steps * each)


class _Run:
    """The state of a run, and its clock."""

    def __init__(self, step: StepDescription, times: ComputeTimes, seed: int, slow: dict[int, float]) -> None:
        self._step, self._times = step, times
        pieces, resources = step.pieces, step.resources
        # A group is what begins at one moment and is waited for as a whole: a turn, or all of them; and the closing.
        of_group = [piece.of if step.closes != "all" or piece.of == CLOSING else 0 for piece in pieces]
        turns = 1 if step.closes == "all" else step.participants
        self._closing = turns
        self._group = [turns if group == CLOSING else group for group in of_group]
        self._members: list[list[int]] = [[] for _ in range(turns + 1)]
        for place, group in enumerate(self._group):
            self._members[group].append(place)
        self._first = [[place for place in members if not pieces[place].after] for members in self._members]
        self._left = [0] * (turns + 1)
        self._began_at = [0.0] * (turns + 1)
        self._last_over = [-1] * (turns + 1)  # the piece that ended the group
        self._followers: list[list[int]] = [[] for _ in pieces]
        for place, piece in enumerate(pieces):
            for before in piece.after:
                self._followers[before].append(place)
        self._needs = [len(piece.after) for piece in pieces]
        self._waits_for = list(self._needs)
        self._over_at = [0.0] * len(pieces)
        self._cause = [-1] * len(pieces)  # what was over last before it could begin
        # What a piece is on: the one that works in turn, its limit, and the shared ones.
        in_turn = [[number for number in piece.on if not resources[number].shared] for piece in pieces]
        self._in_turn = [numbers[0] if numbers else -1 for numbers in in_turn]
        self._links = [
            tuple(n for n in piece.on if resources[n].shared and resources[n].capacity < math.inf) for piece in pieces
        ]
        self._ways = leaves_and_others(self._links)
        self._limit = [resources[number].capacity if number >= 0 else math.inf for number in self._in_turn]
        self._flows_at_all = [
            piece.bytes > 0 and (limit < math.inf or bool(links))
            for piece, limit, links in zip(pieces, self._limit, self._links, strict=True)
        ]
        self._busy_by = [-1] * len(resources)  # the piece that an in-turn resource is at
        self._queue: list[deque[int]] = [deque() for _ in resources]
        self._since = [0.0] * len(resources)
        self._busy_s = [0.0] * len(resources)
        self._bytes = [0.0] * len(resources)
        self._fair = FairLinks([resource.capacity for resource in resources])
        # Compute times: a factor a turn.
        self._factors = self._draw(np.random.default_rng(seed))
        self._slow = [slow.get(number, 1.0) for number in range(step.participants)]
        self._factor = [1.0] * (step.participants * step.turns_a_step)
        # The clock.
        self._heap: list[tuple[float, int, int]] = []  # when, a running number, which piece
        self._now = 0.0
        self.events = 0
        # Steps.
        self._closed = 0
        self._closed_at: list[float] = []
        self._open_since = 0.0
        self._accepted = 0
        self._is_closing = False
        self._turn_of_step = [0] * turns  # the step, or update, that the parameters of its turn are of
        self._reports: deque[int] = deque()  # turns that wait for a closing of their own
        self._turns_over = [0] * turns
        self._held: set[int] = set()  # by the bound
        self._late = self._used = 0
        self._staleness: Counter[int] = Counter()
        self._path = CriticalPath(step, self._in_turn, self._links, times.mean)

    def _draw(self, random: np.random.Generator) -> Iterator[float]:
        while True:
            yield from self._times.draw(random, _DRAWN_AT_ONCE).tolist()

    # ── the clock ────────────────────────────────────────────────────────────────────────────────────────

    def run(self, warm_up: int, steps: int) -> Simulated:
        begun = self._snapshot()
        for group in range(self._closing):
            self._begin_turn(group)
        heap, fair = self._heap, self._fair
        while self._closed < warm_up + steps:
            flow_at = fair.next_over()
            if not heap and flow_at == math.inf:
                raise InvalidInput("step", self._step.strategy, "its pieces wait for one another")
            if heap and heap[0][0] <= flow_at:
                self._now, _, place = heapq.heappop(heap)
                self._ended(place)
            else:
                self._now = flow_at
                for place in fair.over(flow_at):
                    self._carried(place)
            if self._closed == warm_up > begun.closed:
                begun = self._snapshot()
        return self._result(begun)

    def _begin(self, place: int) -> None:
        """A piece could begin: it does, or waits for what it is on."""
        resource = self._in_turn[place]
        if resource >= 0:
            if self._busy_by[resource] >= 0:
                self._queue[resource].append(place)
                return
            self._busy_by[resource] = place
            self._since[resource] = self._now
        self._go(place)

    def _go(self, place: int) -> None:
        self.events += 1
        piece = self._step.pieces[place]
        if self._flows_at_all[place]:
            leaf, others = self._ways[place]
            self._fair.begin(self._now, place, piece.bytes, self._limit[place], others, leaf)
            return
        seconds = piece.seconds
        if piece.kind == "compute" and piece.of >= 0:
            seconds *= self._factor[piece.of * self._step.turns_a_step + piece.turn]
        heapq.heappush(self._heap, (self._now + seconds, self.events, place))

    def _carried(self, place: int) -> None:
        """All bytes of a piece are through."""
        piece = self._step.pieces[place]
        for link in self._links[place]:
            self._bytes[link] += piece.bytes
        resource = self._in_turn[place]
        if resource >= 0:
            self._bytes[resource] += piece.bytes
            self._release(resource, piece.bytes / self._limit[place] if piece.kind == "exchange" else None)
        if piece.seconds:
            heapq.heappush(self._heap, (self._now + piece.seconds, self.events, place))
        else:
            self._over(place)

    def _ended(self, place: int) -> None:
        """The seconds of a piece have passed."""
        resource = self._in_turn[place]
        if resource >= 0 and not self._flows_at_all[place]:
            self._release(resource, None)
        self._over(place)

    def _release(self, resource: int, busy_s: float | None) -> None:
        self._busy_s[resource] += self._now - self._since[resource] if busy_s is None else busy_s
        queue = self._queue[resource]
        if queue:
            place = self._busy_by[resource] = queue.popleft()
            self._since[resource] = self._now
            self._go(place)
        else:
            self._busy_by[resource] = -1

    def _over(self, place: int) -> None:
        self._over_at[place] = self._now
        for follower in self._followers[place]:
            self._waits_for[follower] -= 1
            if not self._waits_for[follower]:
                self._cause[follower] = place
                self._begin(follower)
        group = self._group[place]
        self._left[group] -= 1
        if not self._left[group]:
            self._last_over[group] = place
            self._closing_over() if group == self._closing else self._turn_over(group)

    # ── turns and steps ──────────────────────────────────────────────────────────────────────────────────

    def _begin_turn(self, group: int) -> None:
        step = self._step
        participants = range(step.participants) if step.closes == "all" else (group,)
        for participant in participants:
            for turn in range(step.turns_a_step):
                factor = next(self._factors) * self._slow[participant]
                self._factor[participant * step.turns_a_step + turn] = factor
        self._turn_of_step[group] = self._closed
        if not self._begin_group(group):
            raise InvalidInput("step", step.strategy, f"participant {group} should have a piece of work")

    def _begin_group(self, group: int) -> bool:
        """Returns whether there is anything in it."""
        members = self._members[group]
        self._left[group] = len(members)
        self._began_at[group] = self._now
        for place in members:
            self._waits_for[place] = self._needs[place]
        for place in self._first[group]:
            self._begin(place)
        return bool(members)

    def _turn_over(self, group: int) -> None:
        closes = self._step.closes
        if closes == "each":
            self._reports.append(group)
            if not self._is_closing:
                self._begin_closing()
        elif closes == "all":
            self._accepted = self._step.participants
            self._begin_closing()
        elif self._turn_of_step[group] == self._closed and not self._is_closing:
            self._accepted += 1
            self._turns_over[group] += 1
            if self._accepted == closes:
                self._reports.append(group)
                self._begin_closing()
        else:
            self._late += 1
            if self._is_closing:
                self._turns_over[group] += 1  # it begins with the others
            else:
                self._begin_turn(group)

    def _begin_closing(self) -> None:
        self._is_closing = True
        if not self._begin_group(self._closing):
            self._last_over[self._closing] = -1
            self._closing_over()

    def _closing_over(self) -> None:
        closes, group = self._step.closes, self._reports[0] if self._reports else 0
        self._trace(group)
        if closes == "each":
            self._staleness[self._closed - self._turn_of_step[group]] += 1
        self._used += 1 if closes == "each" else self._accepted
        self._closed += 1
        self._closed_at.append(self._now)
        self._open_since = self._now
        self._accepted = 0
        self._is_closing = False
        if closes == "each":
            self._reports.popleft()
            self._turns_over[group] += 1
            self._go_on(group)
            if self._reports and not self._is_closing:
                self._begin_closing()
        elif closes == "all":
            self._begin_turn(0)
        else:
            self._reports.clear()
            ready = [number for number in range(self._closing) if self._turns_over[number]]
            for number in ready:
                self._turns_over[number] = 0
                self._begin_turn(number)

    def _go_on(self, group: int) -> None:
        """Async: the next turn of whoever is not too far ahead."""
        bound = self._step.bound
        if bound is None:
            self._begin_turn(group)
            return
        self._held.add(group)
        slowest = min(self._turns_over)
        for held in sorted(self._held):
            if self._turns_over[held] - slowest <= bound:
                self._held.discard(held)
                self._begin_turn(held)

    # ── the critical path ────────────────────────────────────────────────────────────────────────────────

    def _trace(self, group: int) -> None:
        """Goes back from the end of a step by what each piece had waited for last, and notes where the time went."""
        is_async = self._step.closes == "each"
        since = self._began_at[group] if is_async else self._open_since
        place = self._last_over[self._closing]
        place = self._last_over[group] if place < 0 else place
        while place >= 0:
            before = self._cause[place] if self._needs[place] else -1
            if before < 0 and self._group[place] == self._closing:
                before = self._last_over[group]
            begun = max(since, self._over_at[before] if before >= 0 else self._began_at[self._group[place]])
            self._path.note(place, self._over_at[place] - begun)
            if begun <= since:
                break
            place = before

    # ── what came out ────────────────────────────────────────────────────────────────────────────────────

    def _snapshot(self) -> _Begun:
        if self._closed:
            self._path.forget()
            self._staleness.clear()
        return _Begun(self._closed, self._now, list(self._busy_s), list(self._bytes), self._late, self._used)

    def _result(self, begun: _Begun) -> Simulated:
        step = self._step
        seconds = self._now - begun.at
        steps = self._closed - begun.closed
        window = step.participants if step.closes == "each" else 1
        ends = np.array([begun.at, *self._closed_at[begun.closed :]])[::window]
        each_s = np.diff(ends) / window
        low, median, high = np.quantile(each_s, (0.05, 0.5, 0.95)).tolist()
        late, used = self._late - begun.late, self._used - begun.used
        uses = self._uses(begun, seconds, steps)
        return Simulated(
            strategy=step.strategy,
            steps=steps,
            seconds=seconds,
            step_s=seconds / steps,
            low_s=low,
            median_s=median,
            high_s=high,
            error_s=float(each_s.std(ddof=1) / math.sqrt(len(each_s))) if len(each_s) > 1 else 0.0,
            turns_per_s=used * step.turns_a_step / seconds if seconds else math.inf,
            late=late / (late + used) if late else 0.0,
            path=self._path.by_kind(),
            binds=max(uses, key=lambda use: use.on_path).name if uses else "",
            resources=uses,
            staleness=Staleness.of(self._staleness) if step.closes == "each" else None,
            events=self.events,
        )

    def _uses(self, begun: _Begun, seconds: float, steps: int) -> tuple[ResourceUse, ...]:
        by_name: dict[str, list[int]] = {}
        for number, resource in enumerate(self._step.resources):
            by_name.setdefault(resource.name, []).append(number)
        uses = []
        for name, numbers in by_name.items():
            busy, carried = [], 0.0
            for number in numbers:
                resource = self._step.resources[number]
                through = self._bytes[number] - begun.bytes[number]
                carried += through / resource.copies
                worked_s = (
                    through / resource.capacity if resource.shared else self._busy_s[number] - begun.busy_s[number]
                )
                busy.append(worked_s / seconds if seconds else 0.0)
            spent = self._path.share_of(numbers)
            uses.append(
                ResourceUse(name, sum(busy) / len(busy), max(busy), carried / len(numbers) / max(1, steps), spent)
            )
        return tuple(uses)


class _Begun(msgspec.Struct, frozen=True):
    """What had been counted when measuring began."""

    closed: int
    at: float
    busy_s: list[float]
    bytes: list[float]
    late: int
    used: int
