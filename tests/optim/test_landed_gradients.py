"""A gradient is said to have landed once it is complete, also if backward runs inside of backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import ModelError
from paceline.optim.gradients import GradientCollector, IntoBuffer


class Collected:
    """A layer that two segments use, and one in neither; what was there when each was said to have landed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.shared, self.last = nn.Linear(3, 3).double(), nn.Linear(3, 1).double()
        self.parameters = [*self.shared.parameters(), *self.last.parameters()]
        self.buffers = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.landed: dict[int, torch.Tensor] = {}
        self.collector = GradientCollector(self.parameters, list(map(IntoBuffer, self.buffers)), self._landed)

    def _landed(self, slot: int) -> None:
        assert slot not in self.landed
        self.landed[slot] = self.buffers[slot].clone()

    def step(self, reentrant: bool) -> None:
        self.landed = {}
        x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        with self.collector.step():
            self.collector.last_pass(True)
            for _ in range(2):
                x = checkpoint(lambda x: self.shared(x).tanh(), x, use_reentrant=reentrant)
            self.last(x).sum().backward()
        self.collector.finish()


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_has_landed_is_complete(reentrant: bool) -> None:
    plain = Collected()
    x = torch.ones(2, 3, dtype=torch.float64)
    plain.collector.close()
    plain.last(plain.shared(plain.shared(x).tanh()).tanh()).sum().backward()
    collected = Collected()
    for step in range(3):
        collected.step(reentrant)
        for buffer, parameter in zip(collected.buffers, plain.parameters, strict=True):
            torch.testing.assert_close(buffer, parameter.grad)
        for slot, there in collected.landed.items():
            assert torch.equal(there, collected.buffers[slot])
        # Not in the first step; and those of the shared layer never, if they come in two parts.
        assert sorted(collected.landed) == ([] if step == 0 else [2, 3] if reentrant else [0, 1, 2, 3])


def test_a_second_part_that_comes_as_a_surprise_is_refused() -> None:
    collected = Collected()
    collected.step(reentrant=False)
    with pytest.raises(ModelError, match="adds to the gradient of a parameter twice in a pass"):
        collected.step(reentrant=True)
