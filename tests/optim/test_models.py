"""Models as owners see them."""

from __future__ import annotations

import pytest
from torch import nn

from paceline.optim.models import evaluating


def test_each_module_is_in_its_own_mode_after_an_evaluation_that_fails() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
    model[1].eval()
    model[2][1].eval()
    before = [module.training for module in model.modules()]

    def fail() -> None:
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [module.training for module in model.modules()] == before
