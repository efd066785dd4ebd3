"""Whether a loss uses parameters itself, beside calling the model: of a cut model it would see parts of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paceline.errors import ModelError
from paceline.torch_private import tree_leaves


class LossCheck(TorchFunctionMode):
    """Refuses operators on these parameters, but for those of the model's forward."""

    def __init__(self, cut: Collection[torch.Tensor]) -> None:
        super().__init__()
        self._cut = set(cut)
        self.in_forward = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self.in_forward:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and leaf in self._cut:
                    raise ModelError(
                        "loss",
                        f"it uses a parameter of shape {tuple(leaf.shape)} itself",
                        "with a layout a device has a part of it only; do that in the model's forward, or in the "
                        "optimizer (weight_decay)",
                    )
        return func(*args, **(kwargs or {}))
