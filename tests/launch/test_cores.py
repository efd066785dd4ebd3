"""Which cores a replica gets."""

from __future__ import annotations

import os
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.cores import allowed_cores, share_of_cores

cores_strategy = st.lists(st.integers(0, 255), min_size=1, max_size=64, unique=True)


@given(cores_strategy, st.data())
def test_replicas_with_enough_cores_get_equal_blocks_of_their_own(cores: list[int], data: st.DataObject) -> None:
    replicas = data.draw(st.integers(1, len(cores)))
    shares = [share_of_cores(replica, replicas, cores) for replica in range(replicas)]
    assert {len(share) for share in shares} == {len(cores) // replicas}
    used = [core for share in shares for core in share]
    assert used == cores[: len(used)], "blocks are contiguous, in order, and no core is given twice"


@given(cores_strategy, st.data())
def test_replicas_that_outnumber_the_cores_share_them_evenly(cores: list[int], data: st.DataObject) -> None:
    replicas = data.draw(st.integers(len(cores) + 1, 300))
    shares = [share_of_cores(replica, replicas, cores) for replica in range(replicas)]
    assert {len(share) for share in shares} == {1}
    counts = Counter(share[0] for share in shares)
    assert set(counts) == set(cores)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_only_cores_this_process_may_use_are_handed_out() -> None:
    before = os.sched_getaffinity(0)
    one = {min(before)}
    os.sched_setaffinity(0, one)
    try:
        assert set(allowed_cores()) == one
    finally:
        os.sched_setaffinity(0, before)
    assert set(allowed_cores()) == before
