"""Answers in the place of a model: what it has said is kept, and said again to whoever calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.errors import ModelError
from paceline.optim.models import evaluating


class Playback(nn.Module):
    """Stands where a model did, and answers with what is put into it, call by call."""

    def __init__(self, answers: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._answers, self._call = answers, 0

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        if self._call == len(self._answers):
            expected = "it did so less often of the whole batch, and has to call it alike each time"
            raise ModelError("metric", f"calling the model {self._call + 1} times", expected)
        self._call += 1
        return self._answers[self._call - 1]


def answers_heard(function: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> list[torch.Tensor]:
    """Returns what the model answers, in eval mode, while `function(model, batch)` calls it."""
    heard: list[Any] = []
    hook = model.register_forward_hook(lambda _, __, answer: heard.append(answer))
    try:
        with torch.no_grad(), evaluating(model):
            function(model, batch)
    finally:
        hook.remove()
    name = getattr(function, "__name__", "metric")
    if not heard:
        raise ModelError("metric", name, "it never calls model(…), whose answers are combined")
    for answer in heard:
        if not isinstance(answer, torch.Tensor):
            expected = "let the model answer with one tensor, wrap it in a module that picks it"
            raise ModelError("the model's answer", type(answer).__name__, expected)
    return heard
