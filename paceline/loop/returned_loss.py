"""What a user's function has returned, looked at before it is used: a loss, or a number of a metric."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch

from paceline.errors import LossError
from paceline.loss_value import FoundLoss

LOSS = "loss"  # the key of a dict under which it is


def read_loss(returned: Any, where: str) -> FoundLoss:
    """Returns the loss that was returned as a scalar tensor, as (sum, count), or in a dict with numbers to log. `where`
    goes into the sentence about what is wrong with it."""
    logged: dict[str, tuple[float, float | None]] = {}
    if isinstance(returned, Mapping):
        if LOSS not in returned:
            keys = ", ".join(map(repr, returned)) or "nothing"
            raise LossError("loss", f"a dict with {keys}", f"give it the key {LOSS!r} ({where})")
        logged = {str(name): read_number(f"logged {name}", it, where) for name, it in returned.items() if name != LOSS}
        returned = returned[LOSS]
    if not isinstance(returned, tuple):
        return FoundLoss(returned, _value(returned, "mean", where), None, logged)
    total, count = _pair("loss", returned, where)
    return FoundLoss(total, _value(total, "sum", where), count, logged)


def read_number(name: str, value: Any, where: str = "") -> tuple[float, float | None]:
    """Returns a number and None, or a sum and its count."""
    if not isinstance(value, tuple):
        return _number(name, value, where), None
    total, count = _pair(name, value, where)
    return _number(f"sum of {name}", total, where), count


def _value(loss: Any, what: str, where: str) -> float:
    if not isinstance(loss, torch.Tensor):
        raise LossError("loss", type(loss).__name__, f"return a scalar tensor ({where})")
    if loss.numel() != 1:
        raise LossError("loss", f"a tensor of shape {tuple(loss.shape)}", f"return its {what}, a scalar ({where})")
    value = float(loss.detach())
    if not math.isfinite(value):
        raise LossError("loss", value, f"it must be finite ({where}); lower the learning rate or look at the data")
    return value


def _pair(name: str, pair: tuple[Any, ...], where: str) -> tuple[Any, float]:
    if len(pair) != 2:
        raise LossError(name, f"a tuple of {len(pair)}", f"return (sum, count){_at(where)}")
    count = _number(f"count of {name}", pair[1], where)
    if not (math.isfinite(count) and count >= 0):
        raise LossError(f"count of {name}", count, f"it must be finite, and 0 or more{_at(where)}")
    return pair[0], count


def _number(name: str, value: Any, where: str) -> float:
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            return float(value.detach())
        what = f"a tensor of shape {tuple(value.shape)}"
    elif isinstance(value, numbers.Real):
        return float(value)
    else:
        what = type(value).__name__
    raise LossError(name, what, f"give a number or a scalar tensor{_at(where)}")


def _at(where: str) -> str:
    return f" ({where})" if where else ""
