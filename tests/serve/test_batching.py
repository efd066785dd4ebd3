"""What serving decides, over any order of events: nothing is lost, nothing waits in vain, batches are of one shape."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.serve.batching import MOST_TRIES, Asked, RequestQueue
from paceline.serve.service_time import ServiceTime

MOST_ROWS, MOST_WAITING = 4, 6


def asked(number: int, rows: int = 1, shape: str = "a", deadline: float = 1e9, version: int | None = None) -> Asked:
    return Asked(number, shape, rows, deadline, version)


def busy(most_rows: int = 4, most_waiting: int = 100) -> RequestQueue:
    """A queue whose one process is at request 0 since time 0, and takes 1 s and 0.1 s a row."""
    queue = RequestQueue(most_rows, most_waiting)
    queue.add_process("p", 1)
    queue.version = 1
    for rows in (1, 4):
        assert queue.arrive(asked(-rows, rows), -10.0) is None
        queue.dispatch(-10.0)
        queue.answered("p", -10.0 + 1 + 0.1 * rows)
    assert queue.arrive(asked(0), 0.0) is None
    assert [(name, len(batch)) for name, batch in queue.dispatch(0.0)] == [("p", 1)]
    return queue


def test_whoever_finds_a_free_process_goes_at_once_and_the_others_go_together() -> None:
    queue = busy()
    for number in range(1, 7):
        assert queue.arrive(asked(number, shape="b" if number == 3 else "a"), 0.0) is None
        assert queue.dispatch(0.0) == []
    queue.answered("p", 1.1)
    ((_, batch),) = queue.dispatch(1.1)
    assert [one.number for one in batch] == [1, 2, 4, 5]
    queue.answered("p", 2.5)
    ((_, batch),) = queue.dispatch(2.5)
    assert [one.number for one in batch] == [3]  # the first of those that wait goes first, whatever its shape


def test_who_cannot_be_answered_in_time_is_refused_at_once() -> None:
    queue = busy()
    refused = queue.arrive(asked(1, deadline=2.0), 0.0)  # 1.1 s of the one before, 1.1 s of its own
    assert refused is not None
    assert abs(refused.retry_after_s - 0.2) < 1e-6
    assert queue.arrive(asked(1, deadline=2.3), 0.0) is None
    for number in (2, 3, 4):
        assert queue.arrive(asked(number, deadline=2.7), 0.0) is None  # they join it: 1.1 + 1.4
    assert queue.arrive(asked(5, deadline=2.7), 0.0) is not None  # and this one would not
    assert [one.number for one in queue.expire(2.3)] == [1]


def test_a_full_queue_refuses_but_not_if_a_process_is_free() -> None:
    queue = busy(most_waiting=1)
    assert queue.arrive(asked(1), 0.0) is None
    refused = queue.arrive(asked(2), 0.0)
    assert refused is not None
    assert "no room" in refused.why
    queue.add_process("q", 1)
    assert queue.arrive(asked(3), 0.0) is None


def test_a_model_that_was_slow_once_is_not_thought_so_for_ever() -> None:
    queue = RequestQueue(4, 10)
    queue.add_process("p", 1)
    queue.version = 1
    queue.arrive(asked(0), 0.0)
    queue.dispatch(0.0)
    queue.answered("p", 60.0)
    for number in range(1, 200):
        now = 60.0 + number
        assert queue.arrive(asked(number, deadline=now + 1), now) is None  # the process is free
        queue.dispatch(now)
        queue.answered("p", now + 0.1)
    assert queue.predicted_s(asked(200), 300.0) < 0.2


def test_one_that_fails_does_not_fail_the_others() -> None:
    queue = busy()
    for number in (1, 2, 3):
        queue.arrive(asked(number), 0.0)
    queue.answered("p", 1.0)
    queue.dispatch(1.0)
    assert queue.failed("p") == []
    for number in (1, 2, 3):
        ((_, batch),) = queue.dispatch(2.0)
        assert [one.number for one in batch] == [number]
        if number == 2:
            assert [one.number for one in queue.failed("p")] == [2]
        else:
            queue.answered("p", 2.0)


def test_one_that_kills_its_process_does_not_take_the_others_with_it() -> None:
    queue = busy()
    for number in (1, 2, 3):
        queue.arrive(asked(number), 0.0)
    queue.answered("p", 1.0)
    queue.dispatch(1.0)
    assert queue.remove_process("p") == []
    for number in (1, 2, 3):
        queue.add_process(f"q{number}", 1)
        ((name, batch),) = queue.dispatch(2.0)
        assert [one.number for one in batch] == [number]
        if number != 2:
            queue.answered(name, 2.0)
        assert [one.number for one in queue.remove_process(name)] == ([2] if number == 2 else [])


def test_each_request_is_answered_by_the_version_it_names_and_the_old_one_goes_when_nobody_needs_it() -> None:
    queue = busy()
    queue.arrive(asked(1, version=1), 0.0)
    queue.arrive(asked(2), 0.0)
    queue.add_process("new", 2)
    queue.version = 2
    assert [(name, batch[0].number) for name, batch in queue.dispatch(0.0)] == [("new", 2)]
    assert queue.retired() == []
    queue.answered("p", 1.0)
    assert queue.retired() == []  # request 1 waits for it
    assert [(name, batch[0].number) for name, batch in queue.dispatch(1.0)] == [("p", 1)]
    queue.answered("p", 2.0)
    assert queue.retired() == ["p"]


@given(st.floats(0, 1), st.floats(0, 0.1), st.lists(st.integers(1, 64), min_size=2, max_size=30))
@settings(max_examples=50, deadline=None)
def test_a_line_is_found_again(start: float, slope: float, rows: list[int]) -> None:
    time = ServiceTime()
    for count in rows:
        time.measured(count, start + slope * count)
    if len(set(rows)) > 1:
        assert abs(time.of(40) - (start + slope * 40)) < 1e-3
    else:
        assert abs(time.of(rows[0]) - (start + slope * rows[0])) < 1e-6


class AnyOrder(RuleBasedStateMachine):
    """Requests, answers, failures, deaths, reloads in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = RequestQueue(MOST_ROWS, MOST_WAITING)
        self.queue.version = 1
        self.now, self.numbers, self.names = 0.0, 0, 0
        self.taken: set[int] = set()
        self.ended: Counter[int] = Counter()
        self.versions: dict[str, int] = {}

    def end(self, several: list[Asked]) -> None:
        self.ended.update(one.number for one in several)

    def pick(self, number: int) -> str:
        running = sorted(name for name, batch in self.queue.running.items() if batch)
        return running[number % len(running)]

    @property
    def somebody_runs(self) -> bool:
        return any(self.queue.running.values())

    @rule(rows=st.integers(0, 6), shape=st.sampled_from("ab"), left=st.sampled_from([0.5, 5.0, 1e9]), pin=st.booleans())
    def arrive(self, rows: int, shape: str, left: float, pin: bool) -> None:
        self.numbers += 1
        version = self.queue.version if pin else None
        one = Asked(self.numbers, shape, rows, self.now + left, version)
        if self.queue.arrive(one, self.now) is None:
            self.taken.add(one.number)

    @rule()
    def dispatch(self) -> None:
        before = list(self.queue.waiting)
        for name, batch in self.queue.dispatch(self.now):
            assert len(batch) == 1 or sum(one.rows for one in batch) <= MOST_ROWS
            assert len({one.shape for one in batch}) == 1
            assert len(batch) == 1 or all(one.joins for one in batch)
            order = [before.index(one.number) for one in batch]
            assert order == sorted(order)
            wanted = {self.queue.version if one.version is None else one.version for one in batch}
            assert wanted == {self.versions[name]}
        for name, batch in self.queue.running.items():
            if not batch:  # whoever is still free has nothing to do
                for one in self.queue.waiting.values():
                    assert (self.queue.version if one.version is None else one.version) != self.versions[name]

    @precondition(lambda self: self.somebody_runs)
    @rule(number=st.integers(0, 9), seconds=st.floats(0, 2))
    def answer(self, number: int, seconds: float) -> None:
        self.now += seconds
        self.end(self.queue.answered(self.pick(number), self.now))

    @precondition(lambda self: self.somebody_runs)
    @rule(number=st.integers(0, 9))
    def fail(self, number: int) -> None:
        self.end(self.queue.failed(self.pick(number)))

    @precondition(lambda self: self.somebody_runs)
    @rule(number=st.integers(0, 9))
    def die(self, number: int) -> None:
        given_up = self.queue.remove_process(self.pick(number))
        assert all(one.tries == MOST_TRIES for one in given_up)
        self.end(given_up)

    @rule()
    def start_process(self) -> None:
        if len(self.queue.running) < 3:
            self.names += 1
            self.versions[str(self.names)] = self.queue.version
            self.queue.add_process(str(self.names), self.queue.version)

    @rule()
    def reload(self) -> None:
        self.queue.version += 1

    @rule()
    def retire(self) -> None:
        for name in self.queue.retired():
            assert self.queue.remove_process(name) == []

    @rule(number=st.integers(0, 9))
    def leave(self, number: int) -> None:
        waiting = list(self.queue.waiting)
        if waiting and self.queue.leave(waiting[number % len(waiting)]):
            self.ended[waiting[number % len(waiting)]] += 1

    @rule()
    def expire(self) -> None:
        self.end(self.queue.expire(self.now))

    @invariant()
    def each_is_in_one_place(self) -> None:
        running = [one.number for batch in self.queue.running.values() for one in batch]
        places = Counter([*self.queue.waiting, *running]) + self.ended
        assert places == Counter(self.taken)


AnyOrder.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
