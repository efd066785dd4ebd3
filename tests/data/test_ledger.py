"""The ledger's algebra: whatever happens between updates, every sample counts once."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import Lease, Ledger
from paceline.errors import CheckpointError, DataError, PacelineError

quick = settings(max_examples=60, deadline=None)
lengths = st.integers(1, 60)
batch_sizes = st.integers(1, 25)
member_counts = st.integers(1, 9)


def all_parts(lease: Lease, members: int = 1, micro_batches: int = 1) -> list[range]:
    return [part for member in lease.parts(members, micro_batches) for part in member]


def advance(ledger: Ledger, updates: int, members: int = 1) -> list[Lease]:
    leases = []
    for _ in range(updates):
        leases.append(ledger.next())
        ledger.commit(leases[-1], all_parts(leases[-1], members))
    return leases


# -------------------------------------------------------------------------------- parts of a lease


@quick
@given(st.integers(0, 50), st.integers(0, 80), member_counts, st.integers(1, 9))
def test_parts_tile_the_lease_exactly_once(start: int, size: int, members: int, micro_batches: int) -> None:
    lease = Lease(step=0, epoch=0, start=start, stop=start + size)
    parts = lease.parts(members, micro_batches)
    assert [len(member) for member in parts] == [micro_batches] * members
    flat = sorted(position for member in parts for part in member for position in part)
    assert flat == list(range(start, start + size))


@quick
@given(st.integers(0, 80), member_counts, st.integers(1, 9))
def test_parts_are_even_contiguous_and_larger_first(size: int, members: int, micro_batches: int) -> None:
    parts = Lease(0, 0, 0, size).parts(members, micro_batches)
    runs = [[parts[member][k] for member in range(members)] for k in range(micro_batches)]
    run_sizes = [sum(map(len, run)) for run in runs]
    for sizes in [run_sizes, *([len(part) for part in run] for run in runs)]:
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
    assert [position for run in runs for part in run for position in part] == list(range(size))


def test_a_batch_smaller_than_the_members_leaves_the_last_ones_empty() -> None:
    assert [len(part) for [part] in Lease(0, 0, 8, 10).parts(members=4)] == [1, 1, 0, 0]


# -------------------------------------------------------------------------------- the order


@quick
@given(lengths, st.integers(-5, 5), st.integers(0, 5), st.booleans())
def test_an_order_is_a_permutation_of_the_dataset(length: int, seed: int, epoch: int, shuffle: bool) -> None:
    ledger = Ledger(length, 4, seed=seed, shuffle=shuffle)
    order = ledger.indices(epoch, range(length))
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(length))
    if not shuffle:
        assert order.tolist() == list(range(length))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    first, second = Ledger(1000, 7, seed=3), Ledger(1000, 64, seed=3)
    second.indices(9, range(10))
    assert torch.equal(first.indices(2, range(1000)), second.indices(2, range(1000)))
    assert torch.equal(first.indices(2, range(1000))[40:90], second.indices(2, range(40, 90)))


def test_neighbouring_seeds_and_epochs_have_unrelated_orders() -> None:
    orders = [Ledger(1000, 1, seed=seed).indices(epoch, range(1000)) for seed in range(6) for epoch in range(6)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            # Two random permutations agree in one place on average; 12 or more is a chance of about 1e-9.
            assert int((one == other).sum()) < 12


def test_the_order_does_not_touch_the_random_numbers_of_the_model() -> None:
    before = torch.get_rng_state()
    Ledger(1000, 1).indices(0, range(1000))
    assert torch.equal(torch.get_rng_state(), before)


def test_at_most_two_orders_stay_in_memory() -> None:
    ledger = Ledger(100, 10)
    for epoch in (0, 1, 2, 1, 3):
        ledger.indices(epoch, range(100))
    assert len(ledger._orders) == 2


def test_positions_beyond_the_dataset_are_refused_not_cut_short() -> None:
    with pytest.raises(PacelineError, match="positions 8 to 11 of epoch 2 cannot be read: the dataset has 10"):
        Ledger(10, 4).indices(2, range(8, 12))


# -------------------------------------------------------------------------------- leases and counting


@quick
@given(lengths, batch_sizes, st.booleans(), st.data())
def test_any_change_of_members_between_updates_counts_every_sample_once(
    length: int, batch_size: int, shuffle: bool, data: st.DataObject
) -> None:
    ledger = Ledger(length, batch_size, shuffle=shuffle)
    while ledger.epoch < 3:
        lease = ledger.next()
        micro_batches = data.draw(st.integers(1, 4))
        ledger.commit(lease, all_parts(lease, data.draw(member_counts), micro_batches))
    for epoch in range(3):
        assert ledger.counts(epoch).tolist() == [1] * length
    assert ledger.check() == f"epochs 0 to 2: {length} samples, each once"


@quick
@given(lengths, batch_sizes, st.integers(1, 12))
def test_leases_follow_each_other_and_use_the_indices_of_their_epoch(
    length: int, batch_size: int, updates: int
) -> None:
    ledger = Ledger(length, batch_size, seed=1)
    used: dict[int, Counter[int]] = {}
    for step in range(updates):
        lease = ledger.next()
        assert lease == ledger.next()  # asking twice changes nothing
        assert lease.step == step == ledger.step
        assert 1 <= lease.size <= batch_size
        assert (lease.epoch, lease.start) == (ledger.epoch, ledger.position)
        following = ledger.peek(lease)
        ledger.commit(lease, all_parts(lease, 2))
        assert ledger.next() == following
        indices = ledger.indices(lease.epoch, range(lease.start, lease.stop)).tolist()
        used.setdefault(lease.epoch, Counter()).update(indices)
    for epoch, counter in used.items():
        assert ledger.counts(epoch).tolist() == [counter[index] for index in range(length)]


@quick
@given(st.integers(1, 60), st.integers(1, 25))
def test_drop_last_gives_only_whole_batches_and_says_how_many_it_dropped(length: int, batch_size: int) -> None:
    if batch_size > length:
        with pytest.raises(DataError, match=rf"batch_size is {batch_size}: with drop_last give at most the {length}"):
            Ledger(length, batch_size, drop_last=True)
        return
    ledger = Ledger(length, batch_size, drop_last=True)
    whole = length // batch_size
    leases = advance(ledger, 2 * whole)
    assert {lease.size for lease in leases} == {batch_size}
    assert [lease.epoch for lease in leases] == [0] * whole + [1] * whole
    assert (ledger.epoch, ledger.position) == (2, 0)
    dropped = length % batch_size
    assert int(ledger.counts(0).sum()) == length - dropped
    assert ledger.check() == f"epochs 0 to 1: {length - dropped} samples, each once" + (
        f", and {dropped} dropped" if dropped else ""
    )


def test_check_says_where_the_run_stands() -> None:
    ledger = Ledger(1797, 256)
    assert ledger.check() == "no samples so far"
    advance(ledger, 2)
    assert ledger.check() == "epoch 0: 512 of 1797 so far, each once"
    advance(ledger, 8)
    assert ledger.check() == "epoch 0: 1797 samples, each once; epoch 1: 512 of 1797 so far, each once"


def test_a_long_run_keeps_one_range_an_epoch() -> None:
    ledger = Ledger(100, 3)
    advance(ledger, 34 * 20)
    assert ledger.epoch == 20
    assert ledger.state()["committed"] == [[epoch, 0, 100] for epoch in range(20)]


# -------------------------------------------------------------------------------- refused commits


def test_commit_names_what_would_be_counted_twice_lost_or_foreign() -> None:
    ledger = Ledger(100, 10)
    advance(ledger, 1)
    lease = ledger.next()
    cases = {
        "positions 14 to 15 would be counted twice": [range(10, 16), range(14, 20)],
        "position 12 would be lost, positions 15 to 16 would be lost": [
            range(10, 12),
            range(13, 15),
            range(17, 20),
        ],
        "positions 10 to 19 would be counted 3 times": [range(10, 20)] * 3,
        "positions 10 to 19 would be lost": [range(10, 10)],
        "position 9 should not be counted, position 20 should not be counted": [range(9, 15), range(15, 21)],
    }
    for sentence, parts in cases.items():
        with pytest.raises(PacelineError) as caught:
            ledger.commit(lease, parts)
        assert str(caught.value) == f"update 1 (positions 10 to 19 of epoch 0) cannot be committed: {sentence}"
    assert ledger.next() == lease  # a refused commit changes nothing
    assert int(ledger.counts(0).sum()) == 10


@quick
@given(st.lists(st.tuples(st.integers(-2, 12), st.integers(0, 6)), max_size=6))
def test_commit_accepts_exactly_the_tilings(cuts: list[tuple[int, int]]) -> None:
    ledger = Ledger(40, 10)
    parts = [range(start, start + size) for start, size in cuts]
    tiles = sorted(position for part in parts for position in part) == list(range(10))
    if tiles:
        ledger.commit(ledger.next(), parts)
    else:
        with pytest.raises(PacelineError, match="cannot be committed"):
            ledger.commit(ledger.next(), parts)
    assert ledger.step == int(tiles)


@quick
@given(st.integers(2, 30), member_counts, st.data())
def test_commit_refuses_a_doubled_or_a_missing_part(size: int, members: int, data: st.DataObject) -> None:
    ledger = Ledger(60, size)
    lease = ledger.next()
    parts = data.draw(st.permutations(all_parts(lease, members)))
    broken = data.draw(st.sampled_from([part for part in parts if part]))
    with pytest.raises(PacelineError, match="counted twice"):
        ledger.commit(lease, [*parts, broken])
    with pytest.raises(PacelineError, match="lost"):
        ledger.commit(lease, [part for part in parts if part != broken])
    ledger.commit(lease, parts)
    assert int(ledger.counts(0).sum()) == size


def test_commit_refuses_any_lease_but_the_next_one() -> None:
    ledger = Ledger(100, 10)
    [first] = advance(ledger, 1)
    for lease in (
        first,
        ledger.peek(ledger.next()),
        replace(ledger.next(), epoch=1),
        replace(ledger.next(), stop=15),
    ):
        with pytest.raises(PacelineError, match=r"the next one is update 1 \(positions 10 to 19 of epoch 0\)"):
            ledger.commit(lease, all_parts(lease))
    assert ledger.step == 1


# -------------------------------------------------------------------------------- state and load


@quick
@given(lengths, batch_sizes, st.integers(0, 15), st.booleans(), st.booleans())
def test_a_resumed_ledger_goes_on_as_if_nothing_had_happened(
    length: int, batch_size: int, updates: int, shuffle: bool, drop_last: bool
) -> None:
    batch_size = min(batch_size, length)
    options: dict[str, Any] = {"seed": 7, "shuffle": shuffle, "drop_last": drop_last}
    ledger = Ledger(length, batch_size, **options)
    advance(ledger, updates)
    state = json.loads(json.dumps(ledger.state()))
    assert state == ledger.state()
    resumed = Ledger(length, batch_size, **options)
    resumed.load(state)
    assert resumed.state() == state
    assert advance(resumed, 12, members=3) == advance(ledger, 12)
    assert resumed.check() == ledger.check()
    assert torch.equal(resumed.counts(ledger.epoch), ledger.counts(ledger.epoch))


@quick
@given(lengths, batch_sizes, batch_sizes, st.integers(0, 10), st.booleans(), st.booleans())
def test_a_resume_with_another_batch_size_still_counts_once(
    length: int, before: int, after: int, updates: int, dropped_before: bool, drops_after: bool
) -> None:
    ledger = Ledger(length, min(before, length), drop_last=dropped_before)
    advance(ledger, updates)
    resumed = Ledger(length, min(after, length), drop_last=drops_after)
    resumed.load(ledger.state())
    assert resumed.step == updates
    advance(resumed, 10)
    resumed.check()
    for epoch in range(resumed.epoch):
        assert resumed.counts(epoch).max() == 1
        if not (dropped_before or drops_after):
            assert resumed.counts(epoch).tolist() == [1] * length


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"length": 1800},
            "dataset length is 1800: the checkpoint was made with 1797 samples, resume with the same dataset",
        ),
        (
            {"length": None},
            "dataset length is None: the checkpoint was made with 1797 samples, resume with the same dataset",
        ),
        ({"seed": 1}, "seed is 1: the checkpoint was made with seed=0, resume with the same"),
        ({"shuffle": False}, "shuffle is False: the checkpoint was made with shuffle=True, resume with the same"),
    ],
)
def test_a_checkpoint_of_other_data_is_refused(options: dict[str, Any], sentence: str) -> None:
    state = Ledger(1797, 32).state()
    other = Ledger(**{"length": 1797, "batch_size": 32, **options})
    with pytest.raises(DataError) as caught:
        other.load(state)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ({"position": "ten"}, "Expected `int`, got `str` - at `$.position`"),
        ({"epoch": -1}, "Expected `int` >= 0 - at `$.epoch`"),
        ({"committed": [[0, 0]]}, "Expected `array` of length >= 3 - at `$.committed[0]`"),
        ({"position": 30}, "the record of epoch 0 does not add up: positions 20 to 29 would be lost"),
        ({"committed": [[0, 0, 20], [0, 5, 6]]}, "does not add up: position 5 would be counted twice"),
        ({"epoch": 1, "position": 0}, "the record of epoch 0 does not add up: positions 20 to 99 would be lost"),
        ({"committed": [[9, 0, 20]]}, "the record of epoch 0 does not add up: positions 0 to 19 would be lost"),
        ({"dropped": [[0, 20, 30]]}, "the record goes beyond epoch 0, which is the one in progress"),
        ({"position": 120, "committed": [[0, 0, 120]]}, "positions 100 to 119 should not be counted"),
    ],
)
def test_a_damaged_state_is_refused_with_the_reason_and_changes_nothing(damage: dict[str, Any], reason: str) -> None:
    ledger = Ledger(100, 10)
    advance(ledger, 2)
    state = ledger.state()
    with pytest.raises(CheckpointError) as caught:
        ledger.load({**state, **damage})
    assert str(caught.value).startswith("the ledger in the checkpoint is damaged: ")
    assert reason in str(caught.value)
    assert ledger.state() == state


# -------------------------------------------------------------------------------- streams


def test_a_stream_commits_what_came_and_begins_anew() -> None:
    ledger = Ledger(None, 10)
    advance(ledger, 2)
    assert ledger.check() == "epoch 0: 20 so far, each once"
    short = replace(ledger.next(), stop=23)  # only three more came
    ledger.commit(short, all_parts(short, 2))
    ledger.end_epoch(0)
    assert ledger.next() == Lease(step=3, epoch=1, start=0, stop=10)
    advance(ledger, 1)
    assert ledger.check() == "epoch 0: 23 samples, each once; epoch 1: 10 so far, each once"
    assert ledger.counts(0).tolist() == [1] * 23
    resumed = Ledger(None, 10)
    resumed.load(json.loads(json.dumps(ledger.state())))
    assert resumed.next() == ledger.next()
    assert resumed.check() == ledger.check()


def test_a_stream_refuses_a_lease_that_is_longer_or_empty() -> None:
    ledger = Ledger(None, 10)
    for stop in (11, 0):
        lease = replace(ledger.next(), stop=stop)
        with pytest.raises(PacelineError, match="the next one is update 0"):
            ledger.commit(lease, all_parts(lease))


def test_an_empty_epoch_of_a_stream_is_explained_instead_of_looping_forever() -> None:
    ledger = Ledger(None, 10)
    advance(ledger, 1)
    ledger.end_epoch(0)
    with pytest.raises(DataError, match=r"number of batches in epoch 1 is 0: .* not a generator"):
        ledger.end_epoch(1)


def test_only_the_current_epoch_of_a_stream_can_end() -> None:
    stream = Ledger(None, 10)
    advance(stream, 1)
    for ledger, epoch in ((stream, 1), (Ledger(10, 2), 0)):
        with pytest.raises(PacelineError, match=f"epoch {epoch} cannot be ended"):
            ledger.end_epoch(epoch)


@pytest.mark.parametrize(
    ("length", "batch_size", "sentence"),
    [
        (10, 0, "batch_size is 0: give a whole number of samples from 1 up"),
        (10, 2.5, "batch_size is 2.5: give a whole number of samples from 1 up"),
        (0, 4, "dataset length is 0: give a dataset of at least one sample"),
    ],
)
def test_impossible_sizes_are_refused(length: int, batch_size: int, sentence: str) -> None:
    with pytest.raises(DataError) as caught:
        Ledger(length, batch_size)
    assert str(caught.value) == sentence
