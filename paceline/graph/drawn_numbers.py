"""Numbers that are drawn, and compared with one that none of them can be below.

Models of `transformers` draw a number for every layer, and leave the layer out if it is below a probability, which is 0
unless somebody asks for it. That needs no value: what is drawn from [0, 1) is not below 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_LESS = (torch.Tensor.__lt__, torch.Tensor.lt, torch.lt)


class DrawnNumbers(TorchFunctionMode):
    """Inside of it, to ask whether such a number is below 0 is answered without its value."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[torch.Tensor] = []  # that nobody has done anything else with

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(drawn is value for drawn in self._drawn for value in args):
            if func in _LESS and isinstance(args[1], (int, float)) and args[1] <= 0:
                return False
            self._drawn = [drawn for drawn in self._drawn if all(drawn is not value for value in args)]
        found = func(*args, **(kwargs or {}))
        if func is torch.rand and found.dim() == 0:
            self._drawn.append(found)
        return found
