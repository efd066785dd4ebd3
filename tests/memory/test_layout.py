"""Where tensors lie: nothing overlaps, nothing is lost, everything has one owner."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.memory.layout import ALIGNMENT, CHUNK_BYTES, FlatLayout, assign

Model = list[tuple[list[int], torch.dtype, int | None]]
DTYPES = (torch.float32, torch.float64, torch.bfloat16)

models = st.lists(
    st.tuples(
        st.lists(st.integers(0, 70), min_size=0, max_size=3),
        st.sampled_from(DTYPES),
        st.sampled_from([None, 0, 1]),
    ),
    min_size=1,
    max_size=12,
)
owners = st.integers(1, 5)


def plan(model: Model, count: int, whole: bool = False) -> FlatLayout:
    parameters = [(f"p{i}", torch.empty(shape, dtype=dtype), group) for i, (shape, dtype, group) in enumerate(model)]
    return FlatLayout.plan(parameters, owners=count, whole_tensors=whole)


@settings(max_examples=60, deadline=None)
@given(models, owners)
def test_slots_are_aligned_and_never_overlap(model: Model, count: int) -> None:
    layout = plan(model, count)
    end = 0
    for slot in layout.slots:
        assert slot.offset % ALIGNMENT == 0
        assert slot.offset >= end
        end = slot.offset + slot.bytes
    assert end <= layout.bytes
    assert sorted(slot.name for slot in layout.slots) == sorted(f"p{i}" for i in range(len(model)))


@settings(max_examples=60, deadline=None)
@given(models, owners, st.booleans())
def test_chunks_hold_every_trained_element_once_and_no_frozen_one(model: Model, count: int, whole: bool) -> None:
    layout = plan(model, count, whole)
    seen = {number: torch.zeros(slot.elements, dtype=torch.int64) for number, slot in enumerate(layout.slots)}
    for chunk in layout.chunks:
        for piece in chunk.pieces:
            slot = layout.slots[piece.slot]
            seen[piece.slot][piece.start : piece.stop] += 1
            first = slot.offset + piece.start * slot.dtype.itemsize
            assert chunk.start <= first
            assert first + piece.elements * slot.dtype.itemsize <= chunk.stop
            assert slot.dtype == chunk.dtype
            if whole:
                assert (piece.start, piece.stop) == (0, slot.elements), "a whole-tensor optimizer was given a part"
    for number, slot in enumerate(layout.slots):
        assert bool((seen[number] == (0 if slot.group is None else 1)).all()), slot


@settings(max_examples=60, deadline=None)
@given(models, owners, st.sampled_from([None, 1000, 100_000]))
def test_every_chunk_has_exactly_one_owner(model: Model, count: int, bucket_bytes: int | None) -> None:
    layout = plan(model, count)
    shards = assign(layout.chunks, count, bucket_bytes)
    owned = sorted(number for shard in shards for bucket in shard for number in bucket)
    assert owned == list(range(len(layout.chunks)))
    assert len({len(shard) for shard in shards}) == 1, "owners disagree about the number of buckets"


def test_a_large_model_is_divided_evenly_in_chunks_of_about_a_megabyte() -> None:
    layout = plan([([3000, 1000], torch.float32, 0), ([7], torch.float32, 0)], 4)
    assert all(chunk.bytes <= CHUNK_BYTES for chunk in layout.chunks)
    shards = assign(layout.chunks, 4)
    sizes = [sum(layout.chunks[n].bytes for bucket in shard for n in bucket) for shard in shards]
    assert max(sizes) - min(sizes) <= CHUNK_BYTES


def test_the_last_registered_parameter_comes_first_as_backward_finishes_it_first() -> None:
    layout = plan([([5], torch.float32, 0), ([5], torch.float32, None), ([5], torch.float32, 0)], 1)
    assert [slot.name for slot in layout.slots] == ["p2", "p0", "p1"]
