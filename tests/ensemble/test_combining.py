"""Combining answers is arithmetic, and the paired test another: properties that hold for whatever is put in."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.combining import Combination, How, Kind
from paceline.ensemble.combining import combined, stacked_by
from paceline.ensemble.paired_test import compare_pairs, mcnemar, paired_bootstrap
from paceline.ensemble.stacking import fit_weights

few = settings(deadline=None, max_examples=25)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(2, 5))  # members, samples, classes


def answers(shape: tuple[int, int, int], seed: int, kind: str = "logits") -> list[torch.Tensor]:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    return list(drawn.softmax(-1) if kind == "probabilities" else drawn)


@given(shapes, st.integers(0, 99), st.sampled_from(["mean", "majority", "weighted", "stacked"]))
@few
def test_logits_combine_to_the_logits_of_what_probabilities_combine_to(
    shape: tuple[int, int, int], seed: int, how: How
) -> None:
    weights = tuple(range(1, shape[0] + 1)) if how in ("weighted", "stacked") else None
    of_logits = combined(Combination(how, "logits", weights=weights), answers(shape, seed))
    of_shares = combined(Combination(how, "probabilities", weights=weights), answers(shape, seed, "probabilities"))
    assert torch.allclose(of_logits.softmax(-1), of_shares, atol=1e-9)
    assert torch.allclose(of_shares.sum(-1), torch.ones(shape[1], dtype=torch.float64))


@given(shapes, st.integers(0, 99), st.randoms())
@few
def test_the_order_of_members_does_not_matter(shape: tuple[int, int, int], seed: int, shuffled: object) -> None:
    given_in, order = answers(shape, seed), list(range(shape[0]))
    shuffled.shuffle(order)  # type: ignore[attr-defined]
    weights = tuple(float(member + 1) for member in range(shape[0]))
    for how in ("mean", "majority", "weighted"):
        made = Combination(how, weights=weights if how == "weighted" else None)  # type: ignore[arg-type]
        assert torch.allclose(combined(made, given_in), combined(made, [given_in[at] for at in order], order))


@given(shapes, st.integers(0, 99), st.sampled_from(["mean", "majority", "stacked"]))
@few
def test_members_that_agree_are_what_each_of_them_is(shape: tuple[int, int, int], seed: int, how: How) -> None:
    one = answers((1, *shape[1:]), seed)[0]
    weights = (1 / shape[0],) * shape[0] if how == "stacked" else None
    together = combined(Combination(how, weights=weights), [one] * shape[0])
    assert torch.equal(together.argmax(-1), one.argmax(-1))
    if how != "majority":
        assert torch.allclose(together.softmax(-1), one.softmax(-1))


@given(shapes, st.integers(0, 99))
@few
def test_equal_weights_are_the_mean_and_one_weight_is_that_member(shape: tuple[int, int, int], seed: int) -> None:
    given_in = answers(shape, seed)
    for kind in ("logits", "values"):
        mean = combined(Combination("mean", kind), given_in)  # type: ignore[arg-type]
        assert torch.allclose(combined(Combination("weighted", kind, weights=(2.0,) * shape[0]), given_in), mean)  # type: ignore[arg-type]
    only = combined(Combination("weighted", "values", weights=(1.0,) + (0.0,) * (shape[0] - 1)), given_in)
    assert torch.allclose(only, given_in[0])


@given(st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=7))
@few
def test_the_majority_has_most_votes(votes: list[list[int]]) -> None:
    labels = [torch.tensor(one) for one in votes]
    shares = [torch.nn.functional.one_hot(one, 4).double() for one in labels]
    for sample in range(3):
        counts = [sum(one[sample] == label for one in votes) for label in range(4)]
        winner = combined(Combination("majority", "probabilities"), shares).argmax(-1)[sample]
        assert counts[int(winner)] == max(counts)
        assert counts[int(combined(Combination("majority", "labels"), labels)[sample])] == max(counts)


def test_classes_along_another_dim() -> None:
    images = [torch.randn(2, 3, 4, 5) for _ in range(3)]
    together = combined(Combination(class_dim=1), images)
    moved = combined(Combination(), [image.movedim(1, -1) for image in images])
    assert torch.allclose(together, moved.movedim(-1, 1))


@pytest.mark.parametrize("kind", ["logits", "probabilities", "values"])
def test_what_weights_are_fitted_with_is_what_they_are_used_for(kind: Kind) -> None:
    given_in, weights = answers((3, 4, 5), 7, kind), (0.7, -0.2, 1.1)
    fitted = stacked_by(torch.stack(given_in), torch.tensor(weights, dtype=torch.float64), kind, -1)
    assert torch.allclose(combined(Combination("stacked", kind, weights=weights), given_in), fitted, atol=1e-12)


@pytest.mark.parametrize("kind", ["logits", "values"])
def test_stacked_weights_find_the_member_that_is_right(kind: Kind) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(3, (200,), generator=generator)
    right = torch.nn.functional.one_hot(targets, 3) * 2.0 + torch.randn(200, 3, generator=generator) * 0.3
    noise = torch.randn(200, 3, generator=generator)

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if kind == "logits":
            return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        return (model(batch[0]) - torch.nn.functional.one_hot(batch[1], 3) * 2.0).square().mean()

    weights = fit_weights(loss, [((targets, targets), [[right], [noise]], 200)], kind, -1)
    assert weights[0] > 0.8
    assert abs(weights[1]) < 0.2 * weights[0]


# ── the paired test ──────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 40), st.integers(0, 40))
@few
def test_mcnemar_is_the_binomial_test(better: int, worse: int) -> None:
    tosses = better + worse
    found = mcnemar(better, worse)
    likely = [math.comb(tosses, heads) / 2**tosses for heads in range(tosses + 1)]
    mine = likely[better]
    assert found == pytest.approx(min(1.0, sum(p for p in likely if p <= mine * (1 + 1e-9))))
    assert found == mcnemar(worse, better)


def test_mcnemar_of_very_many_goes_on_where_the_exact_one_ends() -> None:
    assert mcnemar(530, 470) == pytest.approx(mcnemar(529, 470), rel=0.1)
    assert mcnemar(500, 500) == 1.0


def test_the_bootstrap_agrees_with_the_exact_test_where_both_can_be_made() -> None:
    for better, worse in ((14, 3), (9, 8), (30, 12)):
        gained, lost, same = [(1.0, 1.0)], [(0.0, 1.0)], [(1.0, 1.0)]
        one = gained * better + lost * worse + same * 100
        other = lost * better + gained * worse + same * 100
        exact, drawn = mcnemar(better, worse), paired_bootstrap(one, other)
        assert abs(exact - drawn) < 0.2
        assert (exact < 0.05) == (drawn < 0.05)
        assert compare_pairs(one, other).test == "McNemar"


def test_chance_is_called_a_difference_about_as_rarely_as_it_says() -> None:
    """The same distribution on both sides: at most a few of thirty comparisons may be told as a difference."""
    told = 0
    for seed in range(30):
        drawn = torch.randn(2, 60, generator=torch.Generator().manual_seed(seed)).tolist()
        one, other = ([(value, 1.0) for value in side] for side in drawn)
        told += compare_pairs(one, other).verdict != "too close to say"
    assert told <= 5


def test_less_is_better_where_it_is_said() -> None:
    low, high = [(0.1 * at, 1.0) for at in range(30)], [(0.1 * at + 1, 1.0) for at in range(30)]
    assert compare_pairs(low, high, maximize=False).verdict == "yes"
    assert compare_pairs(low, high).verdict == "no"
    assert compare_pairs(low, high, maximize=False).difference == pytest.approx(1.0)


def test_sums_and_counts_are_one_ratio() -> None:
    one, other = [(3.0, 4.0), (0.0, 1.0)] * 20, [(2.0, 4.0), (1.0, 1.0)] * 20
    found = compare_pairs(one, other)
    assert found.difference == pytest.approx(0.0)
    assert found.verdict == "too close to say"
