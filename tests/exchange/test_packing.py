"""Values that go from one device to another arrive as they were, or are refused where they are sent."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.exchange.packing import CannotTravel, pack, unpack

PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=5)
KEYS = PLAIN | st.tuples(PLAIN, PLAIN)
VALUES = st.recursive(
    PLAIN | st.builds(slice, st.none() | st.integers(0, 9)) | st.sampled_from([torch.Size([2, 3]), torch.bfloat16]),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)
Point = namedtuple("Point", "x y")


def travelled(value: Any) -> tuple[Any, list[torch.Tensor]]:
    description, tensors = pack(value)
    return unpack(description, (tensor.detach().clone() for tensor in tensors))


@given(VALUES)
def test_values_arrive_equal_and_of_the_same_kind(value: Any) -> None:
    arrived, leaves = travelled(value)
    assert repr(arrived) == repr(value)
    assert leaves == []


def test_tensors_arrive_in_their_places_and_require_gradients_as_they_did() -> None:
    trained, fixed = torch.randn(3, requires_grad=True), torch.arange(6).view(2, 3)
    highest = fixed.max(1)
    arrived, leaves = travelled([{"a": (trained, fixed)}, highest, torch.device("cpu")])
    assert leaves == [arrived[0]["a"][0]]
    assert leaves[0].requires_grad
    assert torch.equal(leaves[0], trained)
    assert torch.equal(arrived[0]["a"][1], fixed)
    assert type(arrived[1]) is type(highest)
    assert torch.equal(arrived[1].indices, highest.indices)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ([{1, 2}], "a set"),
        ({"a": Point(1, 2)}, "a Point"),
        ((torch.eye(2).to_sparse(),), "a sparse tensor"),
        ([2**64], "a number of more than 64 bits"),
    ],
)
def test_what_cannot_travel_is_named(value: Any, what: str) -> None:
    with pytest.raises(CannotTravel, match=what):
        pack(value)
