"""The arithmetic of int8, and that torch's kernels compute just that."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.quantize import kernels
from paceline.quantize.rounding import MOST, InputRange, Int8Weight, best_range, range_between, round_weight

numbers = st.floats(-1e3, 1e3, width=32)


@given(st.lists(numbers, min_size=1, max_size=40))
@settings(deadline=None, max_examples=60)
def test_a_weight_is_off_by_half_a_step_at_most_and_zero_is_exact(values: list[float]) -> None:
    weight = torch.tensor([values, [0.0] * len(values)])
    found = round_weight(weight)
    off = (found.as_float - weight).abs()
    assert (off <= found.scales * 0.5 + 1e-6 * weight.abs()).all()
    assert found.as_float[1].eq(0).all()
    assert found.values.abs().max() <= MOST


@given(numbers, numbers, st.lists(st.floats(0, 1), min_size=1, max_size=40))
@settings(deadline=None, max_examples=60)
def test_an_input_within_its_range_is_off_by_half_a_step_at_most(a: float, b: float, shares: list[float]) -> None:
    low, high = min(a, b, 0.0), max(a, b, 0.0)
    rounding = range_between(low, high)
    x = torch.tensor([low + share * (high - low) for share in shares])
    off = (rounding.back(rounding.rounded(x)) - x).abs()
    assert (off <= rounding.step * 1.01 + 1e-6).all()  # half a step, and half a step that the zero was moved by
    assert rounding.back(rounding.rounded(torch.zeros(1))).item() == 0


def test_a_few_large_numbers_are_cut_off_for_a_finer_step_of_the_others() -> None:
    some = torch.cat([torch.randn(200_000, generator=torch.Generator().manual_seed(0)), torch.tensor([40.0])])
    assert best_range(-5.0, 40.0, some).high < 30


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 5), st.integers(0, 2**31))
@settings(deadline=None, max_examples=25)
def test_the_kernel_gives_the_sum_of_whole_products_whatever_is_in_them(k: int, n: int, rows: int, seed: int) -> None:
    """Also where all are as large as they can be: there 16 bits overflow, if inputs have 8."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(-MOST, MOST + 1, (n, k), generator=random, dtype=torch.int8)
    whole = torch.randint(0, MOST + 1, (rows, k), generator=random)
    if seed % 3 == 0:
        values, whole = values.sign() * MOST, torch.full_like(whole, MOST)
    weight, rounding = Int8Weight(values, torch.rand(n, 1, generator=random) + 0.1), InputRange(0.5, 64)
    found = kernels.product(rounding.back(whole), rounding, kernels.pack_matrix(weight, None))
    exact = ((whole.double() - 64) * 0.5) @ (values.double() * weight.scales.double()).T
    assert torch.allclose(found.double(), exact, rtol=1e-6, atol=1e-4)


def test_where_there_are_no_kernels_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise RuntimeError("Didn't find engine for operation quantized::linear_prepack")

    kernels.can_compute.cache_clear()
    assert kernels.can_compute()
    monkeypatch.setattr(kernels, "pack_matrix", missing)
    kernels.can_compute.cache_clear()
    assert not kernels.can_compute()
    kernels.can_compute.cache_clear()
