"""Models whose layers are in int8: one of every kind, and some in which layers have something of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from paceline.quantize.int8_layer import Int8Layer


class Attention(nn.Module):
    """Attention of each kind of call."""

    def __init__(self, batch_first: bool = True, kdim: int | None = None) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=batch_first, kdim=kdim, vdim=kdim)

    def forward(self, *given: torch.Tensor, **masks: Any) -> Any:
        return self.attention(*given, **masks)


class Recurrent(nn.Module):
    """One recurrent module, called with whatever is given."""

    def __init__(self, kind: type[nn.RNNBase], **how: Any) -> None:
        super().__init__()
        self.cells = kind(16, 24, 2, **how)

    def forward(self, *given: Any) -> Any:
        return self.cells(*given)


class TiedWords(nn.Module):
    """A language model whose words are its answers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 32)
        self.cells = nn.LSTM(32, 32, batch_first=True)
        self.head = nn.Linear(32, 40)
        self.head.weight = self.words.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(self.words(text))[0])  # type: ignore[no-any-return]


class Residual(nn.Module):
    """A convolution whose result two take: its BatchNorm is not part of it; another's is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.own = nn.Conv2d(8, 8, 3, padding="same", bias=False), nn.BatchNorm2d(8)
        self.wide = weight_norm(nn.Linear(8, 8))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        seen = self.first(images)
        found = self.own(self.second(self.norm(seen).relu())) + seen
        return self.wide(found.mean((2, 3)))  # type: ignore[no-any-return]


def with_statistics(model: nn.Module) -> nn.Module:
    """The model, with a BatchNorm as after some training."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
                tensor.data.uniform_(0.5, 1.5)
    return model.eval()


def has_int8(model: nn.Module) -> bool:
    """Whether some of its modules compute in int8."""
    return any(isinstance(module, Int8Layer) for module in model.modules())
