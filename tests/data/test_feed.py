"""Feeds give exactly the samples of the asked positions; reading ahead changes when, never what."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from paceline.data import Ahead, Feed, Ledger, open_feed
from paceline.errors import DataError, PacelineError


class Squares(Dataset[tuple[int, int]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


class Counting(IterableDataset[int]):
    """A stream of 0, 1, 2 … that notes how often it was begun and how many samples it gave."""

    def __init__(self, length: int) -> None:
        self.length, self.begun, self.given = length, 0, 0

    def __len__(self) -> int:  # some streams claim a length; they are streams all the same
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        for sample in range(self.length):
            self.given += 1
            yield sample


class Odd(IterableDataset[int]):
    """Every second number, as of a stream that was split by rank."""

    def __init__(self, begin: int) -> None:
        self.begin = begin

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.begin, 8, 2))


def commit_next(ledger: Ledger) -> None:
    lease = ledger.next()
    ledger.commit(lease, [range(lease.start, lease.stop)])


# -------------------------------------------------------------------------------- tensors


def test_tensors_are_picked_in_the_order_of_the_ledger() -> None:
    x, y = torch.randn(50, 3), torch.arange(50)
    ledger = Ledger(50, 8)
    indices = ledger.indices(1, range(10, 17))
    one = open_feed(x).load(ledger, 1, range(10, 17))
    assert torch.equal(one, x[indices])
    for dataset in ((x, y), [x, y], TensorDataset(x, y)):
        batch = open_feed(dataset).load(ledger, 1, range(10, 17))
        assert type(batch) is tuple
        assert torch.equal(batch[0], x[indices])
        assert torch.equal(batch[1], y[indices])


def test_a_batch_of_tensors_never_shares_memory_with_the_dataset() -> None:
    x = torch.zeros(10, 2)
    batch = open_feed(x).load(Ledger(10, 4, shuffle=False), 0, range(4))
    batch.fill_(1)
    assert torch.equal(x, torch.zeros(10, 2))


def test_a_collate_of_the_user_gets_single_samples_of_tensors() -> None:
    x, y = torch.randn(9, 2), torch.arange(9)
    ledger = Ledger(9, 3, shuffle=False)

    def reverse(samples: list[Any]) -> Any:
        return samples[::-1]

    pairs = open_feed((x, y), collate=reverse).load(ledger, 0, range(2, 4))
    assert torch.equal(pairs[0][0], x[3])
    assert [int(label) for _, label in pairs] == [3, 2]
    assert torch.equal(open_feed(x, collate=reverse).load(ledger, 0, range(2, 4))[1], x[2])


def test_a_tensor_dataset_that_transforms_its_samples_keeps_doing_so() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            return tuple(2 * tensor for tensor in super().__getitem__(index))

    [batch] = open_feed(Doubled(torch.arange(6))).load(Ledger(6, 3, shuffle=False), 0, range(3))
    assert batch.tolist() == [0, 2, 4]


# -------------------------------------------------------------------------------- map-style


def test_map_style_samples_are_collated_like_a_data_loader_does() -> None:
    dataset, ledger = Squares(20), Ledger(20, 6)
    ours = open_feed(dataset).load(ledger, 3, range(6, 12))
    indices = ledger.indices(3, range(6, 12)).tolist()
    theirs = default_collate([dataset[index] for index in indices])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert ours[1].tolist() == [index * index for index in indices]


def test_getitems_is_called_once_a_batch_and_must_answer_each_index() -> None:
    class Bulk(Squares):
        def __init__(self, length: int) -> None:
            super().__init__(length)
            self.calls: list[list[int]] = []
            self.answers = slice(None)

        def __getitems__(self, indices: list[int]) -> list[int]:
            self.calls.append(indices)
            return indices[self.answers]

    dataset = Bulk(10)
    feed, ledger = open_feed(dataset), Ledger(10, 4, shuffle=False)
    assert feed.load(ledger, 0, range(4, 8)).tolist() == [4, 5, 6, 7]
    assert dataset.calls == [[4, 5, 6, 7]]
    dataset.answers = slice(3)
    with pytest.raises(DataError, match="__getitems__ is 3: return one for each of the 4 indices"):
        feed.load(ledger, 0, range(4, 8))


def test_a_dataset_that_changes_its_length_is_refused() -> None:
    dataset = Squares(100)
    feed = open_feed(dataset)
    dataset.length = 90
    with pytest.raises(DataError) as caught:
        feed.load(Ledger(100, 10), 0, range(10))
    sentence = "dataset length is 90: it was 100 when training began, and must not change while it lasts"
    assert str(caught.value) == sentence


def test_a_plain_list_of_samples_is_a_dataset() -> None:
    feed = open_feed([(1.0, 0), (2.0, 1), (3.0, 0)])
    x, y = feed.load(Ledger(3, 2, shuffle=False), 0, range(1, 3))
    assert (feed.length, x.tolist(), y.tolist()) == (3, [2.0, 3.0], [1, 0])


@pytest.mark.parametrize("dataset", [torch.arange(10), Squares(10), Counting(10)])
def test_no_positions_are_no_batch_and_what_exists_is_available(dataset: Any) -> None:
    feed, ledger = open_feed(dataset), Ledger(None, 4)
    assert feed.load(ledger, 0, range(4, 4)) is None
    assert [feed.available(ledger, 0, range(at, at + 4)) for at in (0, 4, 8, 12)] == [4, 4, 2, 0]


# -------------------------------------------------------------------------------- streams


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5), st.booleans(), st.data())
def test_a_stream_gives_every_sample_once_in_each_epoch_whoever_dies(
    length: int, batch_size: int, replicas: int, drop_last: bool, data: st.DataObject
) -> None:
    """Each replica has a stream, a feed and a ledger of its own; between updates the division changes."""
    drop_last = drop_last and batch_size <= length
    feeds = [open_feed(Counting(length)) for _ in range(replicas)]
    ledgers = [Ledger(None, batch_size, drop_last=drop_last) for _ in range(replicas)]
    seen: dict[int, list[int]] = {0: [], 1: []}
    while ledgers[0].epoch < 2:
        lease = ledgers[0].next()
        there = {
            feed.available(ledger, lease.epoch, range(lease.start, lease.stop))
            for feed, ledger in zip(feeds, ledgers, strict=True)
        }
        [count] = there
        if count == 0 or (drop_last and count < lease.size):
            for ledger in ledgers:
                ledger.end_epoch(lease.epoch)
            continue
        lease = replace(lease, stop=lease.start + count)
        # A first try whose results are thrown away, as after a death; then the survivors do it all.
        for feed, ledger, [part] in zip(feeds, ledgers, lease.parts(replicas), strict=True):
            feed.load(ledger, lease.epoch, part)
        members = data.draw(st.integers(1, replicas))
        parts = [part for [part] in lease.parts(members)]
        for feed, ledger, part in zip(feeds, ledgers, parts, strict=False):
            batch = feed.load(ledger, lease.epoch, part)
            seen[lease.epoch] += [] if batch is None else batch.tolist()
        for ledger in ledgers:
            ledger.commit(lease, parts)
    expected = list(range(length - length % batch_size if drop_last else length))
    assert seen == {0: expected, 1: expected}


def test_a_stream_holds_only_what_is_not_committed() -> None:
    stream, ledger = Counting(1000), Ledger(None, 10)
    feed = open_feed(stream)
    for _ in range(20):
        lease = ledger.next()
        feed.load(ledger, 0, range(lease.start, lease.start + 2))  # only this replica's part
        following = ledger.peek(lease)
        feed.load(ledger, 0, range(following.start, following.start + 2))
        assert stream.given == following.stop  # two batches, not more
        commit_next(ledger)
    [reading] = feed._readings.values()  # type: ignore[attr-defined]
    assert len(reading._buffer) <= 20
    assert stream.begun == 1


def test_a_resumed_stream_skips_what_was_used() -> None:
    ledger = Ledger(None, 10)
    for _ in range(3):
        commit_next(ledger)
    stream = Counting(100)
    feed = open_feed(stream)
    assert feed.available(ledger, 0, range(40, 50)) == 10  # looked ahead first: must not lose the current batch
    assert feed.load(ledger, 0, range(30, 33)).tolist() == [30, 31, 32]
    assert stream.begun == 1


def test_a_stream_can_go_back_to_an_earlier_checkpoint() -> None:
    ledger, feed = Ledger(None, 10), open_feed(Counting(100))
    state = ledger.state()
    for _ in range(3):
        feed.load(ledger, 0, range(ledger.position, ledger.position + 10))
        commit_next(ledger)
    feed.load(ledger, 0, range(30, 31))
    ledger.load(state)
    assert feed.load(ledger, 0, range(3)).tolist() == [0, 1, 2]


def test_a_resume_with_a_shorter_stream_is_refused() -> None:
    ledger = Ledger(None, 10)
    for _ in range(3):
        commit_next(ledger)
    with pytest.raises(DataError, match="dataset length in epoch 0 is 12: 30 samples of that epoch were used before"):
        open_feed(Counting(12)).available(ledger, 0, range(30, 40))


def test_committed_or_missing_positions_of_a_stream_are_refused_and_harm_nothing() -> None:
    stream, ledger = Counting(25), Ledger(None, 10)
    feed = open_feed(stream)
    feed.load(ledger, 0, range(20))
    commit_next(ledger)
    with pytest.raises(PacelineError, match="position 5 of epoch 0 cannot be loaded: the samples before position 10"):
        feed.load(ledger, 0, range(5, 12))
    with pytest.raises(PacelineError, match=r"position 29 of epoch 0 .* the stream ended after 25 samples"):
        feed.load(ledger, 0, range(20, 30))
    assert feed.load(ledger, 0, range(23, 25)).tolist() == [23, 24]
    ledger.end_epoch(0)
    with pytest.raises(PacelineError, match="epoch 0 cannot be loaded: the run is in epoch 1"):
        feed.load(ledger, 0, range(20, 22))
    assert stream.begun == 1


def test_a_stream_is_known_by_its_first_sample_which_is_read_and_not_lost() -> None:
    stream, ledger = Counting(8), Ledger(length=None, batch_size=4)
    feed = open_feed(stream)
    assert feed.description() == feed.description()
    assert (stream.begun, stream.given) == (1, 1)
    assert feed.load(ledger, 0, range(4)).tolist() == [0, 1, 2, 3]
    assert (stream.begun, feed.description()) == (1, open_feed(Counting(9)).description())
    split = [open_feed(Odd(begin)).description() for begin in (0, 1)]
    assert split[0] != split[1]


def test_a_failure_inside_a_stream_never_passes_for_its_end() -> None:
    def broken() -> Iterator[int]:
        yield from range(5)
        raise OSError("disk on fire")

    feed, ledger = open_feed(broken()), Ledger(None, 4)
    assert feed.load(ledger, 0, range(4)).tolist() == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(OSError, match="disk on fire"):
            feed.available(ledger, 0, range(4, 8))


# -------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("dataset", "sentence"),
    [
        (
            (torch.zeros(5, 2), torch.zeros(4)),
            "shape of a tensor in the dataset is (4,): give tensors of one first dimension, the number of samples "
            "(the first one has (5, 2))",
        ),
        (
            torch.tensor(1.0),
            "shape of a tensor in the dataset is (): give tensors of one first dimension, the number of samples "
            "(the first one has ())",
        ),
        (
            (torch.zeros(5), np.zeros(5)),
            "dataset is 'tuple of Tensor, ndarray': give tensors only, torch.as_tensor makes them",
        ),
        (
            {"x": torch.zeros(3), "scale": 0.5},
            "dataset is 'dict of Tensor, float': give tensors only, torch.as_tensor makes them",
        ),
        (
            {"x": [1, 2, 3]},
            "dataset is 'dict': give tensors, a dataset with len() and [index], or an iterable",
        ),
        ("images/", "dataset is 'str': give tensors, a dataset with len() and [index], or an iterable"),
        (7, "dataset is 'int': give tensors, a dataset with len() and [index], or an iterable"),
    ],
)
def test_what_is_no_dataset_is_refused_with_a_sentence(dataset: Any, sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        open_feed(dataset)
    assert str(caught.value) == sentence


# -------------------------------------------------------------------------------- ahead


class Traced(Dataset[int]):
    """Notes which thread loaded which sample; may be told to wait or to fail."""

    def __init__(self, length: int = 100) -> None:
        self.length = length
        self.loads: list[tuple[str, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken: set[int] = set()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        assert self.gate.wait(10)
        self.loads.append((threading.current_thread().name, index))
        if index in self.broken:
            raise ValueError(f"sample {index} is broken")
        return index

    def by(self, thread: str) -> list[int]:
        return [index for name, index in self.loads if name == thread]


def until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def traced() -> Traced:
    return Traced()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(100, 4, shuffle=False)


def threads_ahead() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "paceline-ahead"}


@pytest.fixture
def others() -> set[threading.Thread]:
    """The threads that were there before: of a loop that another test has left, until it is collected."""
    return threads_ahead()


@pytest.fixture
def ahead(traced: Traced, ledger: Ledger, others: set[threading.Thread]) -> Iterator[Ahead]:
    reader = Ahead(open_feed(traced), ledger)
    yield reader
    traced.gate.set()
    reader.close()
    assert threads_ahead() <= others


def request(*edges: int) -> tuple[int, tuple[range, ...]]:
    return 0, tuple(range(start, stop) for start, stop in pairwise(edges))


def test_what_was_wanted_is_loaded_by_the_thread_before_it_is_taken(ahead: Ahead, traced: Traced) -> None:
    ahead.want([request(0, 2, 4), request(4, 6, 8), request(8, 10, 12)])
    until(lambda: len(traced.loads) == 8)
    time.sleep(0.02)
    assert traced.by("paceline-ahead") == list(range(8))  # two requests: the depth, not the third
    assert [batch.tolist() for batch in ahead.take(*request(0, 2, 4))] == [[0, 1], [2, 3]]
    until(lambda: len(traced.loads) == 12)  # taking one makes room for the third
    assert [batch.tolist() for batch in ahead.take(*request(4, 6, 8))] == [[4, 5], [6, 7]]
    assert [batch.tolist() for batch in ahead.take(*request(8, 10, 12))] == [[8, 9], [10, 11]]
    assert traced.by("MainThread") == []


def test_take_waits_for_a_wanted_load_instead_of_doing_it_twice(ahead: Ahead, traced: Traced) -> None:
    traced.gate.clear()
    ahead.want([request(0, 4)])
    threading.Timer(0.05, traced.gate.set).start()
    assert ahead.take(*request(0, 4))[0].tolist() == [0, 1, 2, 3]
    assert traced.loads == [("paceline-ahead", index) for index in range(4)]


def test_what_was_not_wanted_is_loaded_here_and_now(
    ahead: Ahead, traced: Traced, others: set[threading.Thread]
) -> None:
    assert ahead.take(*request(0, 4))[0].tolist() == [0, 1, 2, 3]  # nothing was ever wanted: no thread at all
    assert threads_ahead() <= others
    ahead.want([request(4, 8), request(8, 12)])
    assert ahead.take(*request(4, 6))[0].tolist() == [4, 5]  # the division changed
    assert traced.by("MainThread") == [0, 1, 2, 3, 4, 5]


def test_taking_out_of_order_does_not_deadlock(ahead: Ahead) -> None:
    ahead.want([request(at, at + 4) for at in range(0, 40, 4)])
    assert ahead.take(*request(36, 40))[0].tolist() == [36, 37, 38, 39]  # far beyond the depth
    assert ahead.take(*request(0, 4))[0].tolist() == [0, 1, 2, 3]


def test_wanting_again_keeps_what_is_loaded_and_forgets_the_rest(ahead: Ahead, traced: Traced) -> None:
    ahead.want([request(0, 4), request(4, 8)])
    until(lambda: len(traced.loads) == 8)
    ahead.want([request(4, 8), request(8, 12)])
    assert ahead.take(*request(4, 8))[0].tolist() == [4, 5, 6, 7]
    assert ahead.take(*request(8, 12))[0].tolist() == [8, 9, 10, 11]
    assert traced.by("paceline-ahead") == list(range(12))
    assert ahead.take(*request(0, 4))[0].tolist() == [0, 1, 2, 3]
    assert traced.by("MainThread") == [0, 1, 2, 3]


def test_a_load_nobody_wants_any_more_stops_at_the_next_micro_batch(ahead: Ahead, traced: Traced) -> None:
    traced.gate.clear()
    ahead.want([request(0, 2, 4, 6, 8)])
    time.sleep(0.02)
    threading.Timer(0.05, traced.gate.set).start()
    assert ahead.take(*request(8, 10))[0].tolist() == [8, 9]
    time.sleep(0.02)
    assert traced.by("paceline-ahead") in ([], [0, 1])


def test_an_error_in_the_thread_is_raised_by_take_with_its_traceback(ahead: Ahead, traced: Traced) -> None:
    traced.broken = {5}
    ahead.want([request(0, 4), request(4, 8)])
    assert ahead.take(*request(0, 4))[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="sample 5 is broken") as caught:
        ahead.take(*request(4, 8))
    assert "__getitem__" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert traced.by("MainThread") == []
    traced.broken = set()
    ahead.want([request(4, 8)])  # the thread lives on
    assert ahead.take(*request(4, 8))[0].tolist() == [4, 5, 6, 7]


def test_empty_parts_are_none_ahead_as_well(ahead: Ahead) -> None:
    ahead.want([request(4, 6, 6)])
    first, second = ahead.take(*request(4, 6, 6))
    assert (first.tolist(), second) == ([4, 5], None)


def test_after_close_everything_is_loaded_directly(ahead: Ahead, traced: Traced) -> None:
    ahead.want([request(0, 4)])
    ahead.close()
    ahead.close()
    ahead.want([request(0, 4)])
    assert ahead.take(*request(0, 4))[0].tolist() == [0, 1, 2, 3]
    assert traced.by("MainThread") == [0, 1, 2, 3]


def test_depth_zero_reads_nothing_ahead(traced: Traced, ledger: Ledger) -> None:
    ahead = Ahead(open_feed(traced), ledger, depth=0)
    ahead.want([request(0, 4)])
    assert ahead.take(*request(0, 4))[0].tolist() == [0, 1, 2, 3]
    assert traced.by("MainThread") == [0, 1, 2, 3]


def test_a_hanging_dataset_does_not_hang_close(traced: Traced, ledger: Ledger, others: set[threading.Thread]) -> None:
    traced.gate.clear()
    ahead = Ahead(open_feed(traced), ledger)
    ahead.want([request(0, 4)])
    began = time.monotonic()
    ahead.close()
    assert time.monotonic() - began < 3
    traced.gate.set()
    until(lambda: threads_ahead() <= others)


@pytest.mark.parametrize("dataset", [torch.arange(97), Squares(97), Counting(97)])
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.data())
def test_training_ahead_gives_the_batches_of_training_without(
    dataset: Any, batch_size: int, data: st.DataObject
) -> None:
    """Member 0 of a run whose size changes at random, with the expectations that then come true or not."""
    feed: Feed = open_feed(dataset)
    plain: Feed = open_feed(dataset)
    ledger = Ledger(feed.length, batch_size, seed=5)
    ahead = Ahead(feed, ledger)
    members = 2
    for _ in range(12):
        lease = ledger.next()
        count = feed.available(ledger, lease.epoch, range(lease.start, lease.stop))
        if count == 0:
            ledger.end_epoch(lease.epoch)
            continue
        lease = replace(lease, stop=lease.start + count)
        mine = tuple(lease.parts(members, 2)[0])
        following = ledger.peek(lease)
        ahead.want([(lease.epoch, mine), (following.epoch, tuple(following.parts(members, 2)[0]))])
        batches = ahead.take(lease.epoch, mine)
        expected = [plain.load(ledger, lease.epoch, part) for part in mine]
        assert repr(batches) == repr(expected)
        if data.draw(st.booleans()):  # a death in this very update, or a member that joins
            members = data.draw(st.integers(1, 4))
            mine = tuple(lease.parts(members, 2)[0])
            expected = [plain.load(ledger, lease.epoch, part) for part in mine]
            assert repr(ahead.take(lease.epoch, mine)) == repr(expected)
        ledger.commit(lease, [part for member in lease.parts(members, 2) for part in member])
    ledger.check()
    ahead.close()


def test_a_script_that_ends_or_fails_without_close_keeps_its_exit_code() -> None:
    script = textwrap.dedent("""
        import sys, torch
        from paceline.data import Ahead, Ledger, open_feed
        ledger = Ledger(20_000, 10_000)
        ahead = Ahead(open_feed(torch.zeros(20_000, 2_000)), ledger)
        ahead.want([(epoch, tuple(range(at, at + 100) for at in range(0, 20_000, 100))) for epoch in range(2)])
        raise ValueError("the user's own failure")
    """)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.strip().endswith("ValueError: the user's own failure")
