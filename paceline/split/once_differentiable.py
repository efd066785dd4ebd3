"""torch's `once_differentiable`, which costs nothing where nobody differentiates twice: cuts call thousands a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import function

Backward = Callable[..., Any]


def once_differentiable(backward: Backward) -> Backward:
    """Returns a `backward` whose gradients cannot be differentiated: who tries is told."""
    told: Backward = function.once_differentiable(backward)

    @functools.wraps(backward)
    def called(ctx: Any, *gradients: Any) -> Any:
        # Without create_graph autograd has switched gradients off before it comes here, which is all that torch's does.
        return (told if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return called
