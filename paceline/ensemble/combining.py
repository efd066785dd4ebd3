"""Answers of members as one, with torch's tensors on both sides; the arithmetic is `paceline/combining.py`'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.combining import Combination, Kind
from paceline.errors import ModelError


def combined(combination: Combination, answers: Sequence[Any], who: Sequence[int] | None = None) -> torch.Tensor:
    """Returns the one answer; `who`: the members that these are of, by number; None: of all, in their order."""
    for answer in answers:
        if not isinstance(answer, torch.Tensor):
            expected = "let each member answer with one tensor, wrap it in a module that picks it"
            raise ModelError("a member's answer", type(answer).__name__, expected)
    dtype = answers[0].dtype
    plain = torch.float32 if dtype == torch.bfloat16 else dtype  # NumPy has no bfloat16
    arrays = [answer.detach().cpu().to(plain).numpy() for answer in answers]
    return torch.from_numpy(combination.of(arrays, who)).to(dtype)


def stacked_by(answers: torch.Tensor, weights: torch.Tensor, kind: Kind, class_dim: int) -> torch.Tensor:
    """Returns what a stacked `Combination` does, with a gradient that reaches the weights."""
    by_member = weights.view(-1, *[1] * (answers.dim() - 1))
    if kind == "values":
        return (answers * by_member).sum(0)
    dim = class_dim + 1 if class_dim >= 0 else class_dim
    logs = answers.log_softmax(dim) if kind == "logits" else answers.clamp_min(1e-30).log()
    pooled = (logs * by_member).sum(0)
    return pooled.log_softmax(class_dim) if kind == "logits" else pooled.softmax(class_dim)
