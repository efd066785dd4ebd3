"""A script that is run only to get at its model ends here: at its `Trainer`, or at its first batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from paceline.errors import PacelineError
from paceline.split.cut import Example, Loss, first_call


class ModelFound(BaseException):
    """Carries the model to whoever runs the script. A script's own `except Exception` does not catch it."""

    def __init__(self, model: nn.Module, dims: Mapping[str, str], call: Example | None) -> None:
        """`dims`: names of parameters' dims, as the script gives them. `call`: what its loss calls the model with."""
        super().__init__()
        self.model, self.dims, self.call = model, dict(dims), call


def found_call(loss: Loss, model: nn.Module, batch: Any) -> Example | None:
    """Returns what the loss of a batch calls the model with; None if it never calls the model as such."""
    try:
        return first_call(loss, model, batch)
    except PacelineError:
        return None
