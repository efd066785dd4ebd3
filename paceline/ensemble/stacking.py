"""Stacking: the weights of members with which the script's own loss is smallest.

There is one number a member, and the loss is computed with the combined answers in the place of the model's, so that
its gradient reaches the weights. Members themselves do not change. What the loss is a mean over is its own business.

Few samples that all are answered rightly would make weights grow without end, as ever surer answers are ever better
there. So they are held near equal shares, by as much as one more sample would weigh: it matters only if there are few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.combining import Kind
from paceline.ensemble.combining import stacked_by
from paceline.ensemble.playback import Playback
from paceline.errors import ModelError
from paceline.loop.evaluation import Metric
from paceline.loop.returned_loss import read_loss

_STEPS = 60
_HOLD = 0.5  # a normal distribution of width 1 around equal shares
FittingBatch = tuple[Any, Sequence[Sequence[torch.Tensor]], int]  # a batch, answers by member and call, samples


def fit_weights(loss: Metric, answered: Sequence[FittingBatch], kind: Kind, class_dim: int) -> list[float]:
    """Returns a weight a member, for `stacked_by`. They begin as equal shares."""
    count = len(answered[0][1])
    weights = torch.full((count,), 1 / count, dtype=answered[0][1][0][0].dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        total, over = torch.zeros(()), 0.0
        for batch, calls, samples in answered:
            by_call = [torch.stack(list(answers)) for answers in zip(*calls, strict=True)]
            model = Playback([stacked_by(answers, weights, kind, class_dim) for answers in by_call])
            found = read_loss(loss(model, batch), "while weights are fitted")
            total = total + found.tensor * (samples if found.count is None else 1.0)
            over += samples if found.count is None else found.count
        held = (weights - 1 / count).square().sum() * _HOLD
        mean = (total + held) / max(over, 1e-30)
        if not mean.requires_grad:
            raise ModelError("loss", "without a gradient", "stacked weights need one that follows from model(…)")
        mean.backward()  # type: ignore[no-untyped-call]
        return mean

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return [float(weight) for weight in weights.detach()]
