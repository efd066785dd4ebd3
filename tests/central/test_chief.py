"""What the chief holds to, whatever its replicas do: every sample counts once, and nobody waits for ever.

A `Fleet` plays all the replicas of a run, and the servers, one event at a time. Hypothesis chooses the events: who acts
next, who dies, who is started again, when a step is made, when the chief itself is started again. Afterwards everybody
who lives goes on in turns, and has to come to the end.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.central.chief.books import Books
from paceline.central.chief.chief import Chief
from paceline.central.chief.tasks import EvaluationTask, FillTask, OnceTask, ResumeTask, TaskKey
from paceline.central.chief.tickets import Close, End, Outcome, Wait, Work
from paceline.errors import CheckpointError, DataError, LossError, PacelineError
from paceline.evaluations import EvaluationKey
from paceline.loss_value import LossPart, MeanPart
from paceline.rules import Async, Rule, Sync

quick = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])

sync_rules = st.one_of(st.just(Sync()), st.builds(Sync, accept=st.integers(1, 7)), st.just(Sync("auto")))
async_rules = st.builds(
    Async,
    bound=st.none() | st.integers(0, 4),
    stale=st.sampled_from(["keep", "scale", "compensate"]) | st.integers(0, 4).map(lambda most: f"drop:{most}"),
)
rules = st.one_of(sync_rules, async_rules)

EVALUATE = EvaluationTask(EvaluationKey(0, 1, 0, 0))


def loss_of(mean: float) -> LossPart:
    return LossPart(MeanPart(mean))


def read_again(books: Books) -> Books:
    """As a log or another process has them."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(books), type=Books)


@dataclass(frozen=True)
class Place:
    """One `batches` loop of the script."""

    chapter: int
    length: int
    batch_size: int
    stop_epoch: int
    drop_last: bool = False

    @property
    def left_out(self) -> int:
        return self.length % self.batch_size if self.drop_last else 0

    @property
    def expected(self) -> Counter[tuple[int, int, int]]:
        epochs, positions = range(self.stop_epoch), range(self.length - self.left_out)
        return Counter((self.chapter, epoch, position) for epoch in epochs for position in positions)


def one_place(length: int, batch_size: int, epochs: int = 1) -> list[Place]:
    return [Place(0, length, batch_size, epochs)]


@st.composite
def scripts(draw: st.DrawFn) -> list[Place]:
    """One to three loops: more epochs of the same data, or other data."""
    sizes = st.tuples(st.integers(0, 25), st.integers(1, 12), st.booleans())
    found: list[Place] = []
    chapter, stop_epoch, size = -1, 0, (0, 1, False)
    for same in draw(st.lists(st.booleans(), min_size=1, max_size=3)):
        if chapter < 0 or not same:
            chapter, stop_epoch, size = chapter + 1, 0, draw(sizes)
        stop_epoch += draw(st.integers(1, 2))
        found.append(Place(chapter, size[0], size[1], stop_epoch, size[2]))
    return found


@dataclass
class Process:
    """A replica as its own program sees it: it asks, works, reports, and waits for the outcome."""

    replica: int
    incarnation: int
    place: int = 0
    work: Work | None = None
    reported: int | None = None
    pulled: int = 0
    alive: bool = True
    waits: str = ""


def positions(runs: Iterable[tuple[int, int] | range]) -> list[int]:
    found: list[int] = []
    for run in runs:
        found.extend(run if isinstance(run, range) else range(*run))
    return found


class Fleet:
    """All replicas and servers of a run around one chief."""

    def __init__(self, rule: Rule, replicas: int, script: list[Place], **options: int) -> None:
        self.script, self.options, self.replicas = script, options, replicas
        self.chief = Chief(rule, replicas, **options)
        self.processes = [Process(replica, 1) for replica in range(replicas)]
        for process in self.processes:
            self.chief.join(process.replica, 1)
        self.unnoticed: list[Process] = []  # deaths that the chief has not been told of
        self.now = 0.0
        self.handed: dict[int, tuple[int, Work]] = {}  # by ticket: to whom
        self.pulled: dict[int, int] = {}
        self.counted: Counter[tuple[int, int, int]] = Counter()
        self.closes: list[Close] = []
        self.settled: dict[int, int] = {}  # by ticket: the step
        self.making: Close | None = None
        self.saved = self.state()
        self.on_close: Callable[[Close], None] = lambda close: None

    def state(self) -> Books:
        books = read_again(self.chief.books())
        assert books == self.chief.books()
        return books

    # ── what a replica does ──────────────────────────────────────────────────────────────────────────────

    def act(self, process: Process) -> None:
        """The next thing that this process does."""
        assert process.alive
        assert self.chief.is_member(process.replica, process.incarnation)
        if process.work is not None:
            self.report(process)
        elif process.reported is not None:
            self.look(process)
        else:
            self.ask(process)

    def ask(self, process: Process) -> None:
        place = self.script[process.place]
        self.chief.begin(place.chapter, place.length, place.batch_size, place.left_out)
        answer = self.chief.ask(process.replica, place.chapter, place.stop_epoch, self.now)
        process.waits = answer.why if isinstance(answer, Wait) else ""
        if isinstance(answer, Work):
            self.take(process, answer)
            again = self.chief.ask(process.replica, place.chapter, place.stop_epoch, self.now)
            assert again == answer  # an answer that was lost on the way
        elif isinstance(answer, End):
            process.place = len(self.script) if answer.stop else process.place + 1
            if process.place == len(self.script):
                self.die(process)  # of old age

    def take(self, process: Process, work: Work) -> None:
        assert work.runs
        assert all(work.runs)
        holder = self.handed.setdefault(work.ticket, (process.replica, work))
        assert holder == (process.replica, work), "a ticket's number is used twice"
        process.work, process.reported, process.pulled = work, None, self.chief.step

    def report(self, process: Process, times: int = 2) -> None:
        assert process.work is not None
        number = process.work.ticket
        self.pulled[number] = process.pulled
        for _ in range(times):
            self.chief.report(process.replica, number, process.pulled, loss_of(float(number)), self.now)
        process.work, process.reported = None, number

    def look(self, process: Process) -> None:
        assert process.reported is not None
        outcome = self.chief.outcome(process.replica, process.reported)
        if outcome is None:
            more = self.chief.more(process.replica, self.now)
            if more is not None:
                self.take(process, more)
            else:
                process.waits = self.chief.waits(process.replica)
            return
        assert outcome == self.chief.outcome(process.replica, process.reported)
        assert outcome.step == self.settled.get(process.reported)
        if outcome.step is not None:
            close = self.closes[outcome.step]
            assert (outcome.loss, outcome.samples) == (close.loss, close.samples)
        process.reported = None

    def break_out(self, process: Process) -> None:
        """The script leaves its loop before the end."""
        if process.alive and process.place < len(self.script) - 1:
            process.work = process.reported = None
            process.place += 1

    def give_back(self, process: Process) -> None:
        """The script does something else first."""
        if process.alive and process.work is not None:
            for number in (process.work.ticket, process.work.ticket - 1):  # as if the message came twice, and late
                self.chief.give_back(process.replica, number)
            process.work = None

    # ── deaths ───────────────────────────────────────────────────────────────────────────────────────────

    def die(self, process: Process) -> None:
        if process.alive:
            process.alive = False
            self.unnoticed.append(process)

    def notice(self) -> None:
        while self.unnoticed:
            process = self.unnoticed.pop()
            self.chief.leave(process.replica, process.incarnation)
            assert not self.chief.is_member(process.replica, process.incarnation)

    def start_again(self, process: Process) -> None:
        if process.alive:
            return
        following = Process(process.replica, process.incarnation + 1)
        self.processes[process.replica] = following
        self.chief.join(following.replica, following.incarnation)
        assert not self.chief.is_member(process.replica, process.incarnation)
        with pytest.raises(PacelineError, match="was started again since"):
            self.chief.join(process.replica, process.incarnation)

    @property
    def living(self) -> list[Process]:
        return [process for process in self.processes if process.alive]

    # ── what the servers do ──────────────────────────────────────────────────────────────────────────────

    def begin_close(self) -> None:
        if self.making is None:
            self.making = self.chief.next_close()
            if self.making is not None:
                self.check(self.making)
        assert self.making is None or self.chief.next_close() is None

    def end_close(self) -> None:
        if self.making is not None:
            close, self.making = self.making, None
            self.count(close)
            self.chief.closed(close)

    def close_all(self) -> None:
        self.begin_close()
        while self.making is not None:
            self.end_close()
            self.begin_close()

    def check(self, close: Close) -> None:
        assert close.step == self.chief.step == len(self.closes)
        assert close.accepted
        assert close.samples == sum(accepted.samples for accepted in close.accepted)
        replicas = [accepted.replica for accepted in close.accepted]
        assert len(set(replicas)) == len(replicas)
        order = [(accepted.epoch, accepted.runs[0]) for accepted in close.accepted]
        assert order == sorted(order)
        loss = 0.0
        for accepted in close.accepted:
            replica, work = self.handed[accepted.ticket]
            assert accepted.replica == replica
            assert accepted.epoch == work.epoch
            assert [range(*run) for run in accepted.runs] == list(work.runs)
            assert accepted.samples == len(positions(work.runs))
            assert accepted.staleness == close.step - self.pulled[accepted.ticket]
            loss += accepted.ticket * accepted.samples / close.samples
        assert close.loss == pytest.approx(loss)
        if isinstance(self.chief.rule, Sync):
            assert math.fsum(accepted.weight for accepted in close.accepted) == pytest.approx(1)
            assert {accepted.staleness for accepted in close.accepted} == {0}
        else:
            [accepted] = close.accepted
            assert accepted.weight == self.chief.rule.weight(accepted.staleness)
            assert accepted.staleness <= self.chief.rule.drop_beyond
        self.on_close(close)

    def count(self, close: Close) -> None:
        self.closes.append(close)
        for accepted in close.accepted:
            assert accepted.ticket not in self.settled
            self.settled[accepted.ticket] = close.step
            for position in positions(accepted.runs):
                self.counted[close.chapter, accepted.epoch, position] += 1
        assert max(self.counted.values()) == 1

    def save(self) -> None:
        self.saved = self.state()

    def restart_chief(self, *, making_is_logged: bool) -> None:
        """The chief's process dies, and another follows, with what was saved and the log of all steps."""
        if self.making is not None:
            if making_is_logged:
                self.count(self.making)
            self.making = None
        before, rule = self.chief, self.chief.rule
        first_ticket = max(self.handed, default=0) + 1
        self.chief = Chief(rule, self.replicas, first_ticket=first_ticket, **self.options)
        self.chief.load(self.saved)
        for close in self.closes:
            place = next(place for place in self.script if place.chapter == close.chapter)
            logged = msgspec.json.decode(msgspec.json.encode(close), type=Close)
            self.chief.replay(logged, place.length, place.batch_size, place.left_out)
        assert self.chief.step == len(self.closes)
        for number in before.books().chapters:
            if number in self.chief.books().chapters and not making_is_logged:
                assert self.chief.book(number).rows() == before.book(number).rows()
        self.unnoticed.clear()
        for replica in range(self.replicas):
            process = self.processes[replica]
            if process.alive:
                self.chief.join(replica, process.incarnation)
            else:
                self.chief.leave(replica)

    # ── all of it ────────────────────────────────────────────────────────────────────────────────────────

    def event(self, kind: str, who: int) -> None:
        process = self.processes[who % self.replicas]
        self.now += 0.1 * (who % 7)
        if kind == "act" and process.alive:
            self.act(process)
        elif kind == "die":
            self.die(process)
        elif kind == "notice":
            self.notice()
        elif kind == "again":
            self.start_again(process)
        elif kind == "break":
            self.break_out(process)
        elif kind == "give back":
            self.give_back(process)
        elif kind == "begin":
            self.begin_close()
        elif kind == "end":
            self.end_close()
        elif kind == "save":
            self.save()
        elif kind == "restart":
            self.restart_chief(making_is_logged=bool(who % 2))

    def finish(self) -> None:
        """All who live go on in turns: everybody gets to the end, and soon."""
        self.notice()
        if not self.living:
            self.start_again(self.processes[0])
        # A step takes an ask, a report and a look. What is late or dropped comes again, but a step made it so.
        samples = sum(place.length * place.stop_epoch for place in self.script)
        rounds = 20 + 6 * (samples + 1) * len(self.living)
        for _ in range(rounds):
            self.close_all()
            for process in self.living:
                self.now += 0.1
                self.act(process)
                self.close_all()
            self.notice()
            if not self.living:
                break
        else:
            pytest.fail(f"after {rounds} rounds replicas wait: {self.living}\n{vars(self.chief)}")

    def check_all_counted(self) -> None:
        expected: Counter[tuple[int, int, int]] = Counter()
        for place in self.script:
            expected |= place.expected
        assert self.counted == expected
        for place in self.script:
            # A chief that was started again after the end knows nothing of data without samples.
            self.chief.begin(place.chapter, place.length, place.batch_size, place.left_out)
            book = self.chief.book(place.chapter)
            rows = [(place.chapter, epoch, at) for epoch, start, stop in book.rows() for at in range(start, stop)]
            assert Counter(rows) == Counter(key for key in expected if key[0] == place.chapter)
            assert book.finished(place.stop_epoch)
            assert book.left(place.stop_epoch) == 0


def events(*more: str) -> st.SearchStrategy[list[tuple[str, int]]]:
    usual = ["act"] * 8 + ["begin", "end"] * 2
    return st.lists(st.tuples(st.sampled_from([*usual, *more]), st.integers(0, 41)), max_size=120)


def play(fleet: Fleet, chosen: Iterable[tuple[str, int]]) -> Fleet:
    for kind, who in chosen:
        fleet.event(kind, who)
    fleet.finish()
    return fleet


# -------------------------------------------------------------------------------- once each, and no deadlock


@quick
@given(rules, st.integers(1, 6), scripts(), st.integers(0, 5), st.integers(0, 2), events())
def test_every_sample_is_counted_once_and_everybody_gets_to_the_end(
    rule: Rule, replicas: int, script: list[Place], warmup_steps: int, warmup_epochs: int, chosen: list[tuple[str, int]]
) -> None:
    fleet = Fleet(rule, replicas, script, warmup_steps=warmup_steps, warmup_epochs=warmup_epochs)
    play(fleet, chosen).check_all_counted()


@settings(quick, max_examples=300)
@given(
    rules,
    st.integers(1, 6),
    scripts(),
    st.integers(0, 5),
    st.integers(0, 2),
    events("die", "die", "notice", "again", "save", "restart", "give back"),
)
def test_deaths_and_returns_of_replicas_and_of_the_chief_lose_nothing(
    rule: Rule, replicas: int, script: list[Place], warmup_steps: int, warmup_epochs: int, chosen: list[tuple[str, int]]
) -> None:
    fleet = Fleet(rule, replicas, script, warmup_steps=warmup_steps, warmup_epochs=warmup_epochs)
    play(fleet, chosen).check_all_counted()


@quick
@given(
    st.lists(rules, min_size=2, max_size=4),
    st.integers(1, 5),
    scripts(),
    st.integers(0, 3),
    events("die", "notice", "again", "rule", "rule", "give back"),
)
def test_the_rule_may_change_at_any_time(
    chosen_rules: list[Rule], replicas: int, script: list[Place], warmup_steps: int, chosen: list[tuple[str, int]]
) -> None:
    fleet = Fleet(chosen_rules[0], replicas, script, warmup_steps=warmup_steps)
    for kind, who in chosen:
        if kind == "rule" and fleet.making is None:  # else the rule that is checked is not the one that closed
            fleet.chief.set_rule(chosen_rules[who % len(chosen_rules)])
        fleet.event(kind, who)
    fleet.finish()
    fleet.check_all_counted()


@quick
@given(
    rules,
    st.integers(1, 5),
    scripts(),
    st.integers(0, 3),
    events("die", "notice", "again", "break", "break", "give back"),
)
def test_replicas_that_leave_their_loop_early_hold_nobody_up(
    rule: Rule, replicas: int, script: list[Place], warmup_steps: int, chosen: list[tuple[str, int]]
) -> None:
    play(Fleet(rule, replicas, script, warmup_steps=warmup_steps), chosen)


@quick
@given(rules, st.integers(1, 5), scripts(), events("die", "notice", "again"), st.integers(0, 100))
def test_a_stop_ends_everybody_between_two_steps(
    rule: Rule, replicas: int, script: list[Place], chosen: list[tuple[str, int]], stop_at: int
) -> None:
    fleet = Fleet(rule, replicas, script)
    for index, (kind, who) in enumerate(chosen):
        fleet.event(kind, who)
        if index == stop_at:
            fleet.chief.stopping = True
    fleet.chief.stopping = True
    before = len(fleet.closes)
    fleet.finish()
    # Sync makes the step that is open and no other; async uses what is on its way.
    assert len(fleet.closes) - before <= (1 if isinstance(rule, Sync) else replicas) + 1


@pytest.mark.parametrize(
    "rule", [Sync(), Sync(2), Sync(3), Sync("auto"), Async(), Async(bound=1), Async(stale="drop:1")]
)
def test_members_die_one_after_another_down_to_one(rule: Rule) -> None:
    for seed in range(20):
        fleet, chance = Fleet(rule, 5, one_place(61, 8, epochs=2)), random.Random(seed)
        victims = [process for process in fleet.processes if process.replica != seed % 5]
        for victim in victims:
            for _ in range(chance.randrange(30)):
                if fleet.living:
                    fleet.act(chance.choice(fleet.living))
                    fleet.close_all()
            fleet.die(victim)
            fleet.notice()
        fleet.finish()
        fleet.check_all_counted()


# -------------------------------------------------------------------------------- sync


@quick
@given(
    st.integers(1, 6),
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(0, 4),
    events("die", "die", "notice", "again"),
)
def test_each_step_of_a_sync_run_has_the_batch_of_one_process(
    replicas: int, length: int, batch_size: int, warmup_steps: int, chosen: list[tuple[str, int]]
) -> None:
    fleet = Fleet(Sync(), replicas, one_place(length, batch_size, epochs=3), warmup_steps=warmup_steps)
    play(fleet, chosen)
    alone = [
        (epoch, list(range(start, min(start + batch_size, length))))
        for epoch in range(3)
        for start in range(0, length, batch_size)
    ]
    made = [
        (close.accepted[0].epoch, sorted(position for part in close.accepted for position in positions(part.runs)))
        for close in fleet.closes
    ]
    assert made == alone
    assert fleet.chief.open_books.late == 0


@quick
@given(st.integers(1, 7), st.integers(1, 6), st.integers(1, 60), st.integers(1, 16), events())
def test_the_first_k_make_a_step_and_fewer_only_when_data_or_replicas_run_out(
    accept: int, replicas: int, length: int, batch_size: int, chosen: list[tuple[str, int]]
) -> None:
    fleet = Fleet(Sync(accept), replicas, one_place(length, batch_size, epochs=2))

    def check(close: Close) -> None:
        left = length - sum(epoch == close.accepted[0].epoch for _, epoch, _ in fleet.counted)
        assert len(close.accepted) == min(accept, replicas, batch_size, left)

    fleet.on_close = check
    play(fleet, chosen)
    fleet.check_all_counted()
    if accept >= replicas:
        assert fleet.chief.open_books.late == 0


def tickets(chief: Chief, *replicas: int, now: float = 0.0) -> list[Work]:
    found = [chief.ask(replica, 0, 1, now) for replica in replicas]
    assert all(isinstance(work, Work) for work in found), found
    return [work for work in found if isinstance(work, Work)]


def begun(rule: Rule, replicas: int, length: int, batch_size: int, **options: int) -> Chief:
    chief = Chief(rule, replicas, **options)
    chief.begin(0, length, batch_size, 0)
    return chief


def reported(chief: Chief, *pairs: tuple[int, Work], now: float = 1.0) -> None:
    for replica, work in pairs:
        chief.report(replica, work.ticket, chief.step, loss_of(0.5), now)


def test_whoever_is_late_is_told_and_its_samples_come_first_in_the_next_step() -> None:
    chief = begun(Sync(2), 3, 100, 10)
    first, second, spare = tickets(chief, 0, 1, 2)
    assert [work.runs for work in (first, second, spare)] == [
        (range(5),),
        (range(5, 10),),
        (range(10, 15),),
    ]
    reported(chief, (2, spare))
    assert chief.next_close() is None
    reported(chief, (0, first))
    close = chief.next_close()
    assert close is not None
    assert [(accepted.replica, accepted.runs) for accepted in close.accepted] == [(0, [(0, 5)]), (2, [(10, 15)])]
    chief.closed(close)
    reported(chief, (1, second))
    assert chief.outcome(1, second.ticket) == Outcome(None, 0.5, 10)
    assert chief.outcome(2, spare.ticket) == Outcome(0, 0.5, 10)
    assert (chief.open_books.late, chief.next_close()) == (1, None)
    assert [work.runs for work in tickets(chief, 0, 1)] == [(range(5, 10),), (range(15, 20),)]


def test_in_whatever_order_replicas_ask_each_gets_its_usual_part() -> None:
    chief = begun(Sync(), 3, 100, 30)
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        works = dict(zip(order, tickets(chief, *order), strict=True))
        start = 30 * chief.step
        assert [works[replica].runs for replica in range(3)] == [
            (range(start + 10 * part, start + 10 * part + 10),) for part in range(3)
        ]
        reported(chief, *works.items())
        close = chief.next_close()
        assert close is not None
        chief.closed(close)


def test_a_step_waits_for_a_replica_that_is_slow_to_ask_and_nobody_takes_its_part() -> None:
    chief = begun(Sync(), 2, 100, 10)
    [work] = tickets(chief, 0)
    reported(chief, (0, work))
    assert chief.more(0, 2.0) is None
    assert chief.waits(0) == "replicas 1"
    [other] = tickets(chief, 1)
    assert (other.runs, other.exact) == ((range(5, 10),), True)


def test_survivors_share_the_parts_of_the_dead_and_compute_them_together_with_their_own() -> None:
    chief = begun(Sync(), 4, 100, 12)
    first, second, _, _ = tickets(chief, 0, 1, 2, 3)
    reported(chief, (0, first), (1, second))
    chief.leave(2)
    chief.leave(3)
    assert chief.outcome(0, first.ticket) is None
    more = [chief.more(0, 2.0), chief.more(1, 2.0)]
    assert [work.runs for work in more if work] == [(range(3), range(9, 12)), (range(3, 9),)]
    assert chief.more(0, 2.0) is None
    assert chief.next_close() is None
    for replica, work in enumerate(more):
        assert work is not None
        reported(chief, (replica, work))
    close = chief.next_close()
    assert close is not None
    assert [(accepted.replica, accepted.weight) for accepted in close.accepted] == [(0, 0.5), (1, 0.5)]


def test_the_last_survivor_gets_all_parts_of_the_dead_at_once() -> None:
    chief = begun(Sync(), 5, 100, 10)
    work = tickets(chief, 0, 1, 2, 3, 4)[0]
    reported(chief, (0, work))
    for dead in (1, 2, 3, 4):
        chief.leave(dead)
    more = chief.more(0, 2.0)
    assert more is not None
    assert more.runs == (range(10),)


def test_a_replica_that_reported_died_and_came_back_can_do_what_others_left() -> None:
    chief = begun(Sync(), 2, 100, 10)
    first, _ = tickets(chief, 0, 1)
    reported(chief, (0, first))
    chief.join(0, 2)
    assert isinstance(chief.ask(0, 0, 1, 1.0), Wait)  # its predecessor's gradient is still good
    chief.leave(1)
    [again] = tickets(chief, 0)
    assert again.runs == (range(10),)


def test_a_batch_smaller_than_the_members_leaves_some_without_a_part() -> None:
    chief = begun(Sync(), 4, 2, 8)
    assert [work.runs for work in tickets(chief, 0, 1)] == [(range(1),), (range(1, 2),)]
    assert chief.ask(2, 0, 1, 0.0) == Wait("the step after this one")


def test_samples_left_out_may_change_between_epochs() -> None:
    chief = begun(Sync(), 1, 10, 4)
    chief.begin(0, 10, 4, 2)
    assert chief.book(0).left(2) == 16
    with pytest.raises(DataError, match="dataset length is 11: another replica has 10 samples"):
        chief.begin(0, 11, 4, 2)


# -------------------------------------------------------------------------------- async


@pytest.mark.parametrize("replicas", [1, 2, 5, 9])
def test_equal_replicas_in_turns_are_stale_by_all_the_others(replicas: int) -> None:
    fleet = Fleet(Async(), replicas, one_place(4000, 4))
    for process in fleet.processes:
        fleet.ask(process)
    while fleet.living:
        for process in fleet.living:
            for _ in range(3):  # it reports, hears that its gradient was used, and pulls with its next ticket
                if process.alive:
                    fleet.act(process)
                    fleet.close_all()
    counts = fleet.chief.open_books.staleness
    mean = sum(staleness * count for staleness, count in counts.items()) / sum(counts.values())
    assert sum(counts.values()) == 1000
    assert mean == pytest.approx(replicas - 1, rel=0.05)


@quick
@given(st.integers(0, 4), st.integers(2, 5), st.integers(0, 6), events())
def test_nobody_gets_work_who_is_more_than_the_bound_ahead(
    bound: int, replicas: int, warmup_steps: int, chosen: list[tuple[str, int]]
) -> None:
    fleet = Fleet(Async(bound=bound), replicas, one_place(60, 1, epochs=2), warmup_steps=warmup_steps)
    done = [0] * replicas
    for kind, who in chosen:
        process = fleet.processes[who % replicas]
        had, warm = process.work, fleet.chief.step >= warmup_steps
        fleet.event(kind, who)
        if had is None and process.work is not None and warm:
            assert done[process.replica] - min(done) <= bound
        done[process.replica] += had is not None and process.work is None and warm
    fleet.finish()
    fleet.check_all_counted()


def test_a_bound_is_on_the_living() -> None:
    chief = begun(Async(bound=1), 3, 100, 1)
    for _ in range(2):
        [work] = tickets(chief, 0)
        reported(chief, (0, work))
        close = chief.next_close()
        assert close is not None
        chief.closed(close)
    assert chief.ask(0, 0, 1, 0.0) == Wait("replica 1, which is 2 steps behind")
    chief.leave(1)
    assert chief.ask(0, 0, 1, 0.0) == Wait("replica 2, which is 2 steps behind")
    chief.leave(2)
    assert tickets(chief, 0)
    chief.join(2, 1)  # it does not begin two steps behind
    assert tickets(chief, 2)


def test_what_became_of_a_ticket_is_not_forgotten_when_the_next_one_is_late() -> None:
    """It came with the answer, and that was lost."""
    chief = begun(Sync(2), 3, 100, 10)
    first, second, _ = tickets(chief, 0, 1, 2)
    reported(chief, (0, first), (1, second))
    close = chief.next_close()
    assert close is not None
    chief.closed(close)
    following = tickets(chief, 0, 1, 2)
    reported(chief, (1, following[1]), (2, following[2]))
    close = chief.next_close()
    assert close is not None
    chief.closed(close)
    outcome, late = chief.outcome(0, first.ticket), chief.outcome(0, following[0].ticket)
    assert outcome is not None
    assert outcome.step == 0
    assert late is not None
    assert late.step is None


def close_one(chief: Chief, work: Work, replica: int) -> None:
    chief.report(replica, work.ticket, chief.step, loss_of(0.5), 1.0)
    close = chief.next_close()
    assert close is not None
    chief.closed(close)


def test_an_async_replica_gets_the_samples_that_it_was_told_to_load() -> None:
    chief = begun(Async(), 2, 10, 1)
    first, other = tickets(chief, 0, 1)
    assert first.following == (0, (range(1, 2),))
    assert other.following == (0, (range(3, 4),))
    close_one(chief, first, 0)
    assert chief.ask(0, 0, 1, 1.0).runs == (range(1, 2),)  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["it is slow", "it has left", "it is elsewhere", "the rule has changed"])
def test_nobody_waits_for_what_is_only_promised_to_another(how: str) -> None:
    chief = begun(Async(), 2, 3, 1)
    first, other = tickets(chief, 0, 1)
    assert (first.following, other.following) == ((0, (range(1, 2),)), None)
    if how == "it has left":
        chief.leave(0)
    elif how == "it is elsewhere":
        chief.begin(1, 3, 1, 0)
        chief.ask(0, 1, 1, 1.0)
    elif how == "the rule has changed":
        chief.set_rule(Sync())
        assert chief.book(0).free(0) == 1
        return
    close_one(chief, other, 1)
    expected = {"it has left": range(1), "it is elsewhere": range(1)}.get(how, range(1, 2))
    assert chief.ask(1, 0, 1, 1.0).runs == (expected,)  # type: ignore[union-attr]


def test_what_is_too_stale_is_dropped_and_comes_again() -> None:
    chief = begun(Async(stale="drop:1"), 4, 4, 1)
    works = tickets(chief, 0, 1, 2)
    for replica, work in enumerate(works):
        chief.report(replica, work.ticket, 0, loss_of(0.5), 1.0)
    for _ in range(2):
        close = chief.next_close()
        assert close is not None
        chief.closed(close)
    assert chief.next_close() is None
    assert chief.outcome(2, works[2].ticket) == Outcome(None, 0.5, 1)
    assert (chief.open_books.dropped, chief.open_books.staleness) == (1, {0: 1, 1: 1, 2: 1})
    assert [work.runs for work in tickets(chief, 3)] == [works[2].runs]


def test_a_replica_has_one_gradient_at_a_time() -> None:
    chief = begun(Async(), 1, 10, 1)
    [work] = tickets(chief, 0)
    reported(chief, (0, work))
    chief.join(0, 2)
    assert chief.ask(0, 0, 1, 0.0) == Wait("the servers to update")


# -------------------------------------------------------------------------------- members and numbers


def test_one_that_was_taken_off_the_list_gets_nothing() -> None:
    chief = begun(Async(), 2, 10, 1)
    chief.leave(1)
    for asks in (lambda: chief.ask(1, 0, 1, 0.0), lambda: chief.ask_task(1, "save", 1)):
        with pytest.raises(PacelineError, match="replica 1 was taken off the list"):
            asks()
    assert chief.more(1, 0.0) is None


def test_news_of_an_old_process_death_does_not_touch_the_new_one() -> None:
    chief = begun(Sync(), 2, 10, 4)
    chief.join(1, 3)
    chief.leave(1, 2)
    assert chief.is_member(1, 3)
    chief.leave(1, 3)
    assert not chief.is_member(1, 3)


def test_a_report_for_another_replicas_ticket_is_not_heard() -> None:
    chief = begun(Async(), 2, 10, 1)
    [work] = tickets(chief, 0)
    chief.report(1, work.ticket, 0, loss_of(0.5), 0.0)
    assert chief.next_close() is None
    assert chief.outcome(0, work.ticket) is None
    assert chief.outcome(1, work.ticket) == Outcome(None, 0.0, 0)


def test_the_number_of_accepted_replicas_is_that_of_the_rule_and_the_members() -> None:
    chief = begun(Sync("auto"), 4, 100, 8)
    assert chief.accepting == 4
    chief.set_rule(Sync(3))
    assert chief.accepting == 3
    tickets(chief, 0)
    assert chief.accepting == 3
    chief.leave(1)
    chief.leave(2)
    chief.leave(0)
    assert chief.accepting == 1
    chief.set_rule(Async())
    assert chief.accepting == 1


# -------------------------------------------------------------------------------- state


def test_a_restored_chief_knows_all_that_was_settled() -> None:
    chief = begun(Sync(2), 3, 20, 6)
    for _ in range(2):
        works = tickets(chief, 0, 1, 2)
        reported(chief, (0, works[0]), (1, works[1]))
        close = chief.next_close()
        assert close is not None
        chief.closed(close)
        chief.report(2, works[2].ticket, chief.step, loss_of(0.5), 9.0)
    part = chief.ask_task(0, EVALUATE, 2)
    assert isinstance(part, tuple)
    again = Chief(Sync(2), 3)
    again.load(read_again(chief.books()))
    assert again.books() == chief.books()
    assert [again.outcome(replica, work.ticket) for replica, work in enumerate(works)] == [
        Outcome(1, 0.5, 6),
        Outcome(1, 0.5, 6),
        Outcome(None, 0.5, 6),
    ]
    assert again.last == chief.last
    assert again.ask_task(1, EVALUATE, 2) == part


def test_a_log_that_overlaps_what_was_loaded_is_counted_once_and_one_with_a_hole_is_refused() -> None:
    chief, log, states = begun(Async(), 1, 10, 2), [], []
    for _ in range(4):
        states.append(chief.books())
        [work] = tickets(chief, 0)
        reported(chief, (0, work))
        close = chief.next_close()
        assert close is not None
        chief.closed(close)
        log.append(close)
    again = Chief(Async(), 1)
    again.load(read_again(states[2]))
    for close in log:
        again.replay(close, 10, 2, 0)
    assert again.books() == chief.books()
    other = Chief(Async(), 1)
    other.replay(log[0], 10, 2, 0)
    with pytest.raises(CheckpointError, match="the log lacks step 1: it goes on with step 2"):
        other.replay(log[2], 10, 2, 0)


def test_a_loss_that_is_no_number_survives() -> None:
    chief = begun(Async(), 1, 10, 2)
    [work] = tickets(chief, 0)
    chief.report(0, work.ticket, 0, loss_of(math.nan), 1.0)
    close = chief.next_close()
    assert close is not None
    chief.closed(close)
    again = Chief(Async(), 1)
    again.load(read_again(chief.books()))
    assert math.isnan(again.last.loss)
    outcome = again.outcome(0, work.ticket)
    assert outcome is not None
    assert (outcome.step, math.isnan(outcome.loss)) == (0, True)


# -------------------------------------------------------------------------------- tasks


@quick
@given(
    st.integers(1, 5),
    st.integers(0, 30),
    st.lists(st.tuples(st.sampled_from(["act", "act", "act", "die", "again"]), st.integers(0, 4)), max_size=60),
)
def test_each_part_of_a_task_is_done_once_by_whoever_turns_up(
    replicas: int, length: int, chosen: list[tuple[str, int]]
) -> None:
    chief = Chief(Sync(), replicas)
    incarnations = dict.fromkeys(range(replicas), 1)
    for replica in range(replicas):
        chief.join(replica, 1)
    holds: dict[int, tuple[int, Any]] = {}
    results: list[list[float]] = []

    def act(replica: int) -> None:
        if replica in holds:
            part, runs = holds.pop(replica)
            values = [float(part), float(sum(positions(runs))), 0.1 * part]
            for _ in range(2):  # the second time is not heard
                chief.tasks.finish(replica, EVALUATE, part, values)
            return
        answer = chief.ask_task(replica, EVALUATE, length)
        if isinstance(answer, tuple):
            assert chief.ask_task(replica, EVALUATE, length) == answer
            assert answer[0] not in [part for part, _ in holds.values()]
            holds[replica] = answer
        elif isinstance(answer, list):
            results.append(answer)
        else:
            assert answer.why == "replicas " + ", ".join(map(str, sorted(holds)))

    for kind, who in chosen:
        replica = who % replicas
        if kind == "act" and replica in chief.members:
            act(replica)
        elif kind == "die" and len(chief.members) > 1:
            chief.leave(replica)
            holds.pop(replica, None)
        elif kind == "again" and replica not in chief.members:
            incarnations[replica] += 1
            chief.join(replica, incarnations[replica])
    for _ in range(3 * replicas + 3):
        for replica in list(chief.members):
            act(replica)
    assert results
    assert all(result == results[0] for result in results)
    parts = int(min(max(length, 1), replicas))
    in_order = 0.0
    for part in range(parts):
        in_order += 0.1 * part
    # Who comes first cuts it, for as many as are members then.
    if not any(kind == "die" for kind, _ in chosen):
        assert results[0] == [sum(range(parts)), sum(range(length)), in_order]
    assert results[0][1] == sum(range(length))
    assert read_again(chief.books()).results == [(EVALUATE, results[0])]


def test_tasks_answer_for_themselves_also_after_a_journey() -> None:
    keys = [FillTask(), ResumeTask(1), OnceTask(1), EVALUATE, EvaluationTask(EvaluationKey(0, 1, 0, 1))]
    assert len(set(keys)) == 5
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(keys), type=list[TaskKey]) == keys
    assert [key.over_after_a_step for key in keys] == [True, True, False, False, False]
    assert [key.holds_for_later_runs for key in keys] == [True, False, False, True, True]


def test_a_task_over_other_data_is_refused() -> None:
    chief = Chief(Sync(), 2)
    chief.ask_task(0, EVALUATE, 10)
    with pytest.raises(DataError, match="dataset length is 9: another replica has 10 samples"):
        chief.ask_task(1, EVALUATE, 9)


def test_a_part_that_was_given_back_is_done_by_another_and_no_other_task_is_touched() -> None:
    chief, save = Chief(Sync(), 2), OnceTask(1)
    first, second = (chief.ask_task(replica, EVALUATE, 10) for replica in range(2))
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    saving = chief.ask_task(0, save, 1)
    chief.tasks.leave(0, EVALUATE)
    chief.tasks.finish(0, EVALUATE, first[0], [1.0])  # it comes too late
    chief.tasks.finish(1, EVALUATE, second[0], [2.0])
    assert chief.ask_task(1, EVALUATE, 10) == first
    chief.tasks.finish(1, EVALUATE, first[0], [4.0])
    assert chief.ask_task(0, EVALUATE, 10) == [6.0]
    assert chief.ask_task(0, save, 1) == saving


# -------------------------------------------------------------------------------- auto


AUTO = Sync("auto")


class Timed:
    """A run in which a ticket takes as long as `seconds(replica, now)` a sample says."""

    def __init__(self, replicas: int, seconds: Callable[[int, float], float], rule: Rule = AUTO) -> None:
        self.fleet = Fleet(rule, replicas, one_place(10_000, 64, epochs=1000))
        self.seconds = seconds
        self.busy: list[tuple[float, int]] = []  # until when
        self.idle = set(range(replicas))

    def run(self, steps: int) -> list[int]:
        """How many were accepted in each of the next so many steps."""
        fleet, stop = self.fleet, len(self.fleet.closes) + steps
        while len(fleet.closes) < stop:
            for replica in sorted(self.idle):
                self._ask(replica)
            fleet.now, replica = heapq.heappop(self.busy)
            fleet.report(fleet.processes[replica])
            self.idle.add(replica)
            fleet.close_all()
        return [len(close.accepted) for close in fleet.closes[-steps:]]

    def _ask(self, replica: int) -> None:
        process = self.fleet.processes[replica]
        if process.reported is not None:
            self.fleet.act(process)
        if process.reported is None:
            self.fleet.act(process)
        if process.work is not None:
            self.idle.discard(replica)
            took = self.seconds(replica, self.fleet.now) * len(positions(process.work.runs))
            heapq.heappush(self.busy, (self.fleet.now + took, replica))


def test_auto_leaves_out_one_that_is_slow_and_takes_it_back_when_it_has_recovered() -> None:
    slow = {3: 5.0}
    run = Timed(4, lambda replica, _: slow.get(replica, 1.0))
    assert run.run(50)[-40:] == [3] * 40
    assert set(run.run(300)) == {3}
    slow.clear()
    assert run.run(60)[-20:] == [4] * 20
    assert set(run.run(200)) == {4}
    slow[0] = 2.0
    assert run.run(50)[-20:] == [3] * 20


@pytest.mark.parametrize("replicas", [1, 2, 4, 7])
def test_auto_waits_for_all_when_all_are_alike(replicas: int) -> None:
    chance = random.Random(replicas)
    run = Timed(replicas, lambda *_: chance.uniform(0.95, 1.05))
    assert set(run.run(200)) == {replicas}
    assert run.fleet.chief.open_books.late == 0


def test_auto_sees_that_each_is_slow_now_and_then() -> None:
    def run(rule: Rule) -> float:
        chance = random.Random(0)
        timed = Timed(8, lambda *_: 8.0 if chance.random() < 0.08 else 1.0, rule)
        timed.run(300)
        return timed.fleet.now

    assert run(AUTO) < 0.6 * run(Sync())


def test_auto_does_not_count_on_one_that_hangs() -> None:
    # Quick whenever it answers, until it takes a ticket for ever.
    run = Timed(4, lambda replica, now: 5.0 if replica == 3 and now < 800 else 1e6 if replica == 3 else 1.0)
    assert run.run(60)[-1] == 3
    assert set(run.run(300)) == {3}


def test_auto_without_durations_or_with_none_at_all_takes_all() -> None:
    run = Timed(3, lambda *_: 0.0)
    assert set(run.run(30)) == {3}


def test_auto_takes_all_after_a_warm_up_on_one() -> None:
    fleet = Fleet(Sync("auto"), 4, one_place(100, 8, epochs=2), warmup_steps=12)
    fleet.finish()
    fleet.check_all_counted()
    assert [len(close.accepted) for close in fleet.closes[:16]] == [1] * 12 + [4] * 4


# ── losses that count ────────────────────────────────────────────────────────────────────────────────────────


def counted(total: float, count: float, unit: float, accuracy: float = 0.0) -> LossPart:
    return LossPart(MeanPart(total, count), unit, {"accuracy": MeanPart(accuracy * count, count)})


def closed_with(chief: Chief, *parts: LossPart) -> Close:
    works = tickets(chief, *range(len(parts)))
    for replica, (work, part) in enumerate(zip(works, parts, strict=True)):
        chief.report(replica, work.ticket, chief.step, part, 1.0)
    close = chief.next_close()
    assert close is not None
    return close


def test_sums_are_divided_by_what_all_have_counted_and_gradients_weigh_as_their_units() -> None:
    close = closed_with(begun(Sync(), 2, 10, 10), counted(6.0, 3.0, 3.0, 0.5), counted(14.0, 7.0, 5.0, 1.0))
    assert (close.loss, close.samples) == (2.0, 10)
    assert [accepted.weight for accepted in close.accepted] == [0.3, 0.5]
    assert close.logged == {"accuracy": pytest.approx(0.85)}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(close), type=Close) == close


def test_one_that_counts_nothing_counts_nothing() -> None:
    close = closed_with(begun(Sync(), 2, 10, 10), counted(0.0, 0.0, 5.0), counted(14.0, 7.0, 7.0))
    assert (close.loss, [accepted.weight for accepted in close.accepted]) == (2.0, [5 / 7, 1.0])


def test_an_async_gradient_is_divided_by_its_own_count_and_weighed_by_its_staleness() -> None:
    chief = begun(Async(stale="scale"), 2, 100, 10)
    first, second = tickets(chief, 0, 1)
    chief.report(0, first.ticket, 0, counted(6.0, 3.0, 6.0), 1.0)
    close = chief.next_close()
    assert close is not None
    assert (close.loss, close.accepted[0].weight, close.accepted[0].unit) == (2.0, 2.0, 2.0)
    chief.closed(close)
    chief.report(1, second.ticket, 0, counted(8.0, 4.0, 2.0), 1.0)
    close = chief.next_close()
    assert close is not None
    assert close.accepted[0].staleness == 1
    assert close.accepted[0].weight == 0.5 * Async(stale="scale").weight(1)
    assert close.accepted[0].unit == 0.5


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ((counted(0.0, 0.0, 1.0), counted(0.0, 0.0, 1.0)), "loss is 'a sum over 0': the counts of the whole batch add"),
        ((counted(1.0, 1.0, 1.0), loss_of(1.0)), "loss is 'a scalar': another part of the batch has (sum, count)"),
        (
            (counted(1.0, 1.0, 1.0), LossPart(MeanPart(1.0, 1.0))),
            "loss is \"a dict with 'accuracy'\": another part of the batch has no such key",
        ),
    ],
)
def test_losses_that_cannot_be_added_up_are_refused(parts: tuple[LossPart, ...], sentence: str) -> None:
    with pytest.raises(LossError) as raised:
        closed_with(begun(Sync(), 2, 10, 10), *parts)
    assert str(raised.value).startswith(sentence)


def test_what_was_logged_reaches_every_replica_of_the_step() -> None:
    chief = begun(Sync(), 2, 10, 10)
    works = tickets(chief, 0, 1)
    for replica, work in enumerate(works):
        part = LossPart(MeanPart(1.0), logged={"error": MeanPart(float(replica)), "pairs": MeanPart(3.0, replica + 1)})
        chief.report(replica, work.ticket, 0, part, 1.0)
    close = chief.next_close()
    assert close is not None
    chief.closed(close)
    for replica, work in enumerate(works):
        outcome = chief.outcome(replica, work.ticket)
        assert outcome is not None
        assert outcome.logged == {"error": 0.5, "pairs": 2.0}
