"""Wires: what is exact stays exact, what is lost is bounded, and a diverged value is never hidden."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import StrategyError
from paceline.exchange.feedback import Feedback
from paceline.exchange.top_values import TopWire
from paceline.exchange.wire import wire
from paceline.exchange.wire_format import Wire
from paceline.exchange.wire_names import WIRES

ALL = [wire(name) for name in (*WIRES, "topk:0.01", "topk:0.3")]
BLOCK = 1024
PIECE = 256 * 1024
# Lengths around every seam there is: nothing, one value, the four-byte padding, a block, several blocks.
LENGTHS = st.sampled_from([0, 1, 2, 3, 4, 5, 1023, 1024, 1025, 2048, 4095, 4096, 4097, 9001])

properties = settings(max_examples=40, deadline=None)
every_wire = pytest.mark.parametrize("coding", ALL, ids=lambda coding: coding.name)


@st.composite
def values_of(draw: st.DrawFn, lowest_power: int = -30, highest_power: int = 30) -> Tensor:
    """Normal values whose blocks differ in size by many powers of ten, some of them zero."""
    length = draw(LENGTHS)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(length, generator=generator)
    values[torch.rand(length, generator=generator) < 0.1] = 0.0
    for start in range(0, length, BLOCK):
        values[start : start + BLOCK] *= 10.0 ** draw(st.integers(lowest_power, highest_power))
    return values


def encoded(coding: Wire, values: Tensor) -> Tensor:
    out = torch.full((coding.encoded_bytes(values.numel()),), 0xA5, dtype=torch.uint8)
    coding.encode(values, out)
    return out


def decoded(coding: Wire, coded: Tensor, elements: int) -> Tensor:
    out = torch.full((elements,), torch.nan)
    coding.decode(coded, out)
    return out


def round_trip(coding: Wire, values: Tensor) -> Tensor:
    return decoded(coding, encoded(coding, values), values.numel())


def largest_of_its_block(values: Tensor) -> Tensor:
    largest = torch.empty_like(values)
    for start in range(0, values.numel(), BLOCK):
        largest[start : start + BLOCK] = values[start : start + BLOCK].abs().max()
    return largest


def test_an_unknown_wire_is_answered_with_all_wires_and_the_nearest() -> None:
    with pytest.raises(StrategyError) as caught:
        wire("int4")
    names = "fp32, bf16, fp16, int8, topk:SHARE (such as topk:0.01), powersgd:RANK (such as powersgd:4)"
    assert str(caught.value) == f"wire is 'int4': give one of {names} (did you mean int8?)"
    with pytest.raises(StrategyError) as caught:
        wire("zip")
    assert str(caught.value) == f"wire is 'zip': give one of {names}"


@pytest.mark.parametrize("name", ["topk", "topk:", "topk:0", "topk:0.6", "topk:nan", "topk:-1", "topk:x", "topk:0.1:2"])
def test_a_share_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(StrategyError) as caught:
        wire(name)
    assert str(caught.value) == f"wire is {name!r}: give the share of the values that travels, up to 0.5: topk:0.01"


@pytest.mark.parametrize("name", ["powersgd", "powersgd:", "powersgd:0", "powersgd:257", "powersgd:1.5", "powersgd:-1"])
def test_a_rank_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(StrategyError) as caught:
        wire(name)
    assert str(caught.value) == f"wire is {name!r}: give the rank of what travels, from 1 to 256: powersgd:4"


def test_each_wire_is_found_by_its_name_and_only_those_that_lose_much_ask_for_feedback() -> None:
    assert {name: wire(name).name for name in WIRES} == {name: name for name in WIRES}
    assert [coding.name for coding in ALL if coding.lossy] == ["int8", "topk:0.01", "topk:0.3"]


def test_bytes_on_the_link_are_what_the_format_says() -> None:
    sizes = {name: [wire(name).encoded_bytes(n) for n in (0, 1, 5, 1024, 1025, 15_000_000)] for name in WIRES}
    assert sizes == {
        "fp32": [0, 4, 20, 4096, 4100, 60_000_000],
        "bf16": [0, 2, 10, 2048, 2050, 30_000_000],
        "fp16": [0, 2, 10, 2048, 2050, 30_000_000],
        "int8": [0, 8, 12, 1028, 1036, 15_058_596],
    }


def test_int8_bytes_are_scale_codes_and_zero_padding() -> None:
    coded = encoded(wire("int8"), torch.tensor([-254.0, 3.1, 0.0, 127.0, 0.9]))
    assert coded[:4].view(torch.float32).item() == 2.0
    assert coded[4:9].view(torch.int8).tolist() == [-127, 2, 0, 64, 0]  # 63.5 goes to the even neighbour
    assert coded[9:].tolist() == [0, 0, 0]


@properties
@given(values_of())
def test_fp32_is_exact(values: Tensor) -> None:
    assert torch.equal(round_trip(wire("fp32"), values), values)


@properties
@given(values_of())
def test_bf16_is_within_half_its_last_bit(values: Tensor) -> None:
    assert ((round_trip(wire("bf16"), values) - values).abs() <= values.abs() * 2**-8).all()


@properties
@given(values_of(-12, 12))
def test_fp16_is_within_half_its_last_bit_and_saturates(values: Tensor) -> None:
    received = round_trip(wire("fp16"), values)
    inside = values.abs() <= 65504
    bound = values.abs() * 2**-11 + 2**-25  # half of the smallest step near zero
    assert ((received - values).abs() <= bound)[inside].all()
    assert torch.equal(received[~inside], values.sign()[~inside] * 65504)


@properties
@given(values_of())
def test_int8_is_within_half_a_scale_of_its_block(values: Tensor) -> None:
    received = round_trip(wire("int8"), values)
    scale = largest_of_its_block(values) / 127
    # Scale, reciprocal and product are each rounded once: 127 times three roundings of 2**-24.
    assert ((received - values).abs() <= scale * (0.5 + 127 * 3 * 2**-24)).all()
    assert torch.equal(received[values == 0], values[values == 0])


@properties
@given(st.lists(st.integers(-127, 127), min_size=1, max_size=50), st.integers(-100, 100))
def test_int8_is_exact_on_multiples_of_a_scale_that_is_a_power_of_two(codes: list[int], power: int) -> None:
    values = torch.tensor([*codes, 127], dtype=torch.float32) * 2.0**power
    assert torch.equal(round_trip(wire("int8"), values), values)


@pytest.mark.parametrize("length", [1, 1024, 2051])
def test_int8_keeps_a_block_of_zeros_exact_and_finite(length: int) -> None:
    assert torch.equal(round_trip(wire("int8"), torch.zeros(length)), torch.zeros(length))


def test_int8_does_not_divide_by_a_scale_that_vanishes() -> None:
    smallest_normal = torch.finfo(torch.float32).tiny
    values = torch.tensor([1e-45, -3e-42, 1e-38, -1e-37])
    assert ((round_trip(wire("int8"), values) - values).abs() <= smallest_normal).all()


@every_wire
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("position", [0, 1500, 2047, 2050])
def test_a_diverged_value_is_seen_at_the_other_end(coding: Wire, bad: float, position: int) -> None:
    values = torch.linspace(-1, 1, 2051)
    values[position] = bad
    received = round_trip(coding, values)
    if isinstance(coding, TopWire):  # no other value is touched
        assert received.isfinite().sum() == 2050
        torch.testing.assert_close(received[position], torch.tensor(bad), equal_nan=True)
        return
    first = position // coding.block * coding.block
    struck = torch.zeros(2051, dtype=torch.bool)
    struck[first : first + coding.block] = True
    assert not received[struck].isfinite().any()
    assert received[~struck].isfinite().all()
    if coding.lossy:
        assert received[struck].isnan().all()
    else:
        torch.testing.assert_close(received[position], torch.tensor(bad), equal_nan=True)


def test_fp16_saturates_next_to_nan_and_inf() -> None:
    values = torch.tensor([torch.nan, 1e6, -1e6, torch.inf, 65519.0, 1.0])
    expected = torch.tensor([torch.nan, 65504.0, -65504.0, torch.inf, 65504.0, 1.0])
    torch.testing.assert_close(round_trip(wire("fp16"), values), expected, rtol=0, atol=0, equal_nan=True)


@every_wire
@properties
@given(values=values_of(-12, 12), seed=st.integers(0, 2**31))
def test_decode_add_gives_the_bits_of_decode_then_add(coding: Wire, values: Tensor, seed: int) -> None:
    coded = encoded(coding, values)
    total = torch.randn(values.numel(), generator=torch.Generator().manual_seed(seed))
    expected = total + decoded(coding, coded, values.numel())
    coding.decode_add(coded, total)
    assert torch.equal(total, expected)


@every_wire
def test_pieces_of_whole_blocks_make_the_bytes_of_the_whole(coding: Wire) -> None:
    block = max(BLOCK, coding.block)
    elements = PIECE + 5 * block + 7  # past the piece that is worked on at once, and a short block at the end
    values = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    cuts = [0, 3 * block, 4 * block, PIECE + block, elements]
    pieces = [encoded(coding, values[a:b]) for a, b in pairwise(cuts)]
    whole = encoded(coding, values)
    assert torch.equal(torch.cat(pieces), whole)
    received = decoded(coding, whole, elements)
    if not isinstance(coding, TopWire):
        assert (received - values).abs().max() <= values.abs().max() / 127 * 0.501
    total = values.clone()
    coding.decode_add(whole, total)
    assert torch.equal(total, values + received)


@properties
@given(values_of(), st.sampled_from([0.001, 0.01, 0.25, 0.5]))
def test_topk_delivers_the_largest_of_each_block_as_they_are_and_nothing_else(values: Tensor, share: float) -> None:
    coding = TopWire(f"topk:{share}", share)
    received = round_trip(coding, values)
    for start in range(0, values.numel(), coding.block):
        block, got = values[start : start + coding.block], received[start : start + coding.block]
        kept = got != 0
        assert torch.equal(got[kept], block[kept])
        count = min(coding.kept(block.numel()), int((block != 0).sum()))
        assert int(kept.sum()) == count
        assert not count or block[kept].abs().min() >= block[~kept].abs().max() if (~kept).any() else True


@every_wire
@properties
@given(values=values_of(-12, 12))
def test_what_the_receiver_lacks_is_what_is_left(coding: Wire, values: Tensor) -> None:
    rest, coded = values.clone(), encoded(coding, values)
    again = torch.empty_like(coded)
    coding.encode_rest(rest, again)
    assert torch.equal(again, coded)
    assert torch.equal(rest, values - decoded(coding, coded, values.numel()))


@pytest.mark.parametrize("name", ["int8", "topk:0.01", "topk:0.3"])
@properties
@given(values=values_of(-3, 3), factors=st.lists(st.floats(-2, 2), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_feedback_sums_to_the_truth_also_when_steps_are_dropped(
    name: str, values: Tensor, factors: list[float], seed: int
) -> None:
    coding, elements = wire(name), values.numel()
    feedback = Feedback(elements, coding)
    coded = torch.empty(coding.encoded_bytes(elements), dtype=torch.uint8)
    given_sum, received_sum = (torch.zeros(elements, dtype=torch.float64) for _ in range(2))
    for number, factor in enumerate(factors):
        feedback.encode(factor * values, coded)
        if (number * 7 + seed) % 3 == 0:  # nobody got it
            feedback.rollback()
            continue
        feedback.commit()
        given_sum += factor * values
        received_sum += decoded(coding, coded, elements)
    bound = 4 * len(factors) ** 2 * largest_of_its_block(values) * 2**-23
    assert ((given_sum - received_sum - feedback.residual).abs() <= bound.double()).all()


@every_wire
def test_a_buffer_of_the_wrong_size_is_not_filled_by_broadcasting(coding: Wire) -> None:
    coded = torch.zeros(coding.encoded_bytes(1000), dtype=torch.uint8)
    for work in (coding.encode, lambda values, coded: coding.decode(coded, values)):
        with pytest.raises(AssertionError):
            work(torch.ones(1), coded)


@properties
@given(values_of(), st.lists(st.floats(-2, 2), min_size=1, max_size=12))
def test_feedback_delivers_the_whole_sum_but_for_one_quantum(values: Tensor, factors: list[float]) -> None:
    coding, elements = wire("int8"), values.numel()
    feedback = Feedback(elements, coding)
    coded = torch.empty(coding.encoded_bytes(elements), dtype=torch.uint8)
    given_sum, received_sum = (torch.zeros(elements, dtype=torch.float64) for _ in range(2))
    for factor in factors:
        feedback.encode(factor * values, coded)
        feedback.commit()
        given_sum += factor * values
        received_sum += decoded(coding, coded, elements)
    missing = given_sum - received_sum
    largest = 2 * largest_of_its_block(values)
    assert (missing.abs() <= largest / 127).all()
    # What is missing is what the sender still owes, to the rounding of each step's float32 sum.
    assert ((missing - feedback.residual).abs() <= len(factors) * largest * 2**-23).all()


def test_without_feedback_a_small_value_never_arrives_and_with_it_its_sum_does() -> None:
    coding = wire("int8")
    values = torch.tensor([127.0, 0.3, -0.01])
    coded = torch.empty(coding.encoded_bytes(3), dtype=torch.uint8)
    plain, fed = torch.zeros(3), torch.zeros(3)
    feedback = Feedback(3, coding)
    for _ in range(1000):
        coding.encode(values, coded)
        coding.decode_add(coded, plain)
        feedback.encode(values, coded)
        feedback.commit()
        coding.decode_add(coded, fed)
    assert plain.tolist() == [127_000.0, 0.0, 0.0]
    assert ((fed - 1000 * values).abs() <= 0.52).all()


def test_a_dropped_step_leaves_the_residual_and_its_redo_sends_the_same_bytes() -> None:
    coding, elements = wire("int8"), PIECE + 3000
    generator = torch.Generator().manual_seed(1)
    feedback = Feedback(elements, coding)
    first, second = (torch.empty(coding.encoded_bytes(elements), dtype=torch.uint8) for _ in range(2))
    feedback.encode(torch.randn(elements, generator=generator), first)
    assert not feedback.residual.any()  # proposed, not yet owed
    feedback.commit()
    owed = feedback.residual.clone()
    assert owed.any()

    gradient = torch.randn(elements, generator=generator)
    feedback.encode(gradient, first)
    feedback.rollback()
    feedback.commit()  # late: the proposal is gone
    assert torch.equal(feedback.residual, owed)
    feedback.encode(gradient, second)
    assert torch.equal(first, second)

    feedback.encode(2 * gradient, first)  # redone without a rollback: the last proposal counts
    feedback.commit()
    assert torch.equal(feedback.residual, (2 * gradient + owed) - decoded(coding, first, elements))


def test_a_sender_resumed_from_a_saved_residual_sends_the_same_bytes() -> None:
    coding = wire("int8")
    generator = torch.Generator().manual_seed(2)
    first, second = (torch.empty(coding.encoded_bytes(3000), dtype=torch.uint8) for _ in range(2))
    running, resumed = Feedback(3000, coding), Feedback(3000, coding)
    for _ in range(3):
        running.encode(torch.randn(3000, generator=generator), first)
        running.commit()
    resumed.residual.copy_(running.residual)
    gradient = torch.randn(3000, generator=generator)
    running.encode(gradient, first)
    resumed.encode(gradient, second)
    assert torch.equal(first, second)


def test_feedback_shows_a_diverged_value_at_the_other_end() -> None:
    coding = wire("int8")
    feedback = Feedback(2000, coding)
    coded = torch.empty(coding.encoded_bytes(2000), dtype=torch.uint8)
    values = torch.ones(2000)
    values[1500] = torch.nan
    feedback.encode(values, coded)
    assert decoded(coding, coded, 2000)[1024:].isnan().all()
    feedback.rollback()
    assert not feedback.residual.any()
