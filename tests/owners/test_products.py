"""A gradient that an operator computes where it is to go is the one that would have been copied there."""

from __future__ import annotations

import pickle

import torch
from torch import nn

from paceline.owners.gradients import GradientCollector, Whole, landing_of
from paceline.split.layout import local


def collected(passes: int, *, hooked: bool = False) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """What lands for a weight that is used twice in every pass; what plain torch finds for it; and what was used."""
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(5))
    unused = nn.Parameter(torch.randn(2, 2))
    seen: list[torch.Tensor] = []
    if hooked:
        weight.register_hook(seen.append)
    places = [torch.full_like(parameter, 7.0) for parameter in (weight, bias, unused)]
    inputs = [torch.randn(3, 4, 5) for _ in range(passes)]

    def backward(linear: object) -> None:
        for x in inputs:
            y = linear(linear(x, weight, bias), weight, bias)  # type: ignore[operator]
            y.square().sum().backward()

    backward(lambda *given: torch.nn.functional.linear(*given))
    assert weight.grad is not None
    expected = weight.grad.clone()
    weight.grad = bias.grad = None
    seen.clear()
    collector = GradientCollector([weight, bias, unused], list(map(Whole, places)))
    assert (landing_of(weight) is None) is hooked
    collector.begin()
    backward(lambda x, weight, bias: local.linear(x, weight, bias, (5, 5), []))
    used = collector.finish()
    assert weight.grad is None
    assert bool(seen) is hooked
    assert not places[2].any()
    pickle.dumps(weight)  # a model can be saved as a whole while it is trained
    collector.close()
    assert landing_of(weight) is None
    return places[0], expected, used


def test_what_is_used_twice_in_each_of_several_passes_adds_up() -> None:
    for passes in (1, 3):
        landed, expected, used = collected(passes)
        torch.testing.assert_close(landed, expected)
        assert used == [True, True, False]


def test_a_hook_of_the_user_still_sees_the_gradient() -> None:
    landed, expected, _ = collected(2, hooked=True)
    torch.testing.assert_close(landed, expected)


def test_outside_of_a_step_the_gradient_is_plain_torchs() -> None:
    weight = nn.Parameter(torch.randn(2, 3))
    collector = GradientCollector([weight], [Whole(torch.zeros(2, 3))])
    x = torch.randn(4, 3)
    local.linear(x, weight, None, (2, 3), []).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, torch.ones(4, 2).t() @ x)
    collector.close()
