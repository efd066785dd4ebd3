"""The models every strategy has to train like one process does.

They are small, deterministic and without dropout. Each stands for something that a way of distributing could get
wrong: see the comments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

Data = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """What a `Trainer` needs."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[nn.Module, Any], Any]
    data: Data
    batch_size: int
    scheduler: LRScheduler | None = None
    clip_norm: float | None = None
    asked: torch.Tensor | None = None  # what the model is called with, if not the first of the data


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def _labels(count: int, classes: int) -> torch.Tensor:
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(8))


def _cross_entropy(model: nn.Module, batch: Data) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def mlp() -> Case:
    """Two groups of options, a schedule, clipping that bites."""
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 100), nn.Tanh(), nn.Linear(100, 5))
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 3e-3}], lr=1e-2)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return Case(model, optimizer, _cross_entropy, (_numbers(40, 20), _labels(40, 5)), 16, schedule, clip_norm=0.1)


def conv_batchnorm() -> Case:
    """Statistics over the whole batch, buffers, a last batch of 7 after two of 16."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),  # a bias would be cancelled by BatchNorm: its gradient is only rounding
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, bias=False),
        nn.BatchNorm2d(16, momentum=None),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
    return Case(model, optimizer, _cross_entropy, (_numbers(39, 3, 12, 12), _labels(39, 10)), 16)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 24, num_layers=2, batch_first=True)
        self.last = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


def lstm() -> Case:
    """Parameters that the module also holds as flat weights, and that are used many times in one backward."""
    model = Recurrent()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2, momentum=0.5, centered=True)
    return Case(model, optimizer, _cross_entropy, (_numbers(45, 9, 6), _labels(45, 3)), 15)


class Transformer(nn.Module):
    def __init__(self, words: int = 50, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.output = nn.Linear(width, words, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embedding(words), src_mask=nn.Transformer.generate_square_subsequent_mask(8))
        return self.output(hidden)  # type: ignore[no-any-return]


def tied_transformer() -> Case:
    """One parameter under two names, with two gradients to add."""

    def loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    words = torch.randint(50, (42, 9), generator=torch.Generator().manual_seed(9))
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    return Case(model, optimizer, loss, (words,), 14, asked=words[:, :-1])


class Branching(nn.Module):
    """Only some samples take the branch: a replica whose part has none of them has no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 30)
        self.frozen.requires_grad_(False)
        self.main = nn.Linear(30, 1)
        self.branch = nn.Linear(30, 1)
        self.never = nn.Linear(7, 7)
        self.not_given = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(x).relu()
        y: torch.Tensor = self.main(hidden)
        takes = x[:, 0] > 1.2
        if takes.any():
            y = y + torch.where(takes[:, None], self.branch(hidden), 0.0)
        return y


def frozen_and_unused() -> Case:
    """Frozen parameters, one that nobody uses, one the optimizer does not have, one used by some samples only."""

    def loss(model: nn.Module, batch: Data) -> torch.Tensor:
        x, y = batch
        return F.mse_loss(model(x), y)

    model = Branching()
    given = [p for name, p in model.named_parameters() if name != "not_given"]
    optimizer = torch.optim.Adagrad(given, lr=0.05, initial_accumulator_value=0.1)  # has state from the start
    return Case(model, optimizer, loss, (_numbers(40, 4), _numbers(40, 1)), 8)


def bf16_autocast() -> Case:
    """Products in bf16, parameters in fp32."""

    def loss(model: nn.Module, batch: Data) -> torch.Tensor:
        x, y = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        return F.cross_entropy(out.float(), y)

    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Case(model, optimizer, loss, (_numbers(48, 20), _labels(48, 5)), 16)


def whole_tensors() -> Case:
    """An optimizer that must not be given pieces: Muon makes each update matrix orthogonal."""
    model = nn.Sequential(
        nn.Linear(20, 200, bias=False), nn.ReLU(), nn.Linear(200, 120, bias=False), nn.ReLU(), nn.Linear(120, 5, False)
    )
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.02)
    return Case(model, optimizer, _cross_entropy, (_numbers(48, 20), _labels(48, 5)), 16, clip_norm=1.0)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(60, 12, sparse=True, padding_idx=0)
        self.last = nn.Linear(12, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(words).mean(1))  # type: ignore[no-any-return]


def sparse_table() -> Case:
    """Gradients of a few rows, the same row used by several samples, one that gets none."""
    model = Bag()
    words = torch.randint(60, (44, 5), generator=torch.Generator().manual_seed(9))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return Case(model, optimizer, _cross_entropy, (words, _labels(44, 4)), 16)


def _some(count: int, most: int) -> torch.Tensor:
    """True for very different numbers of places: of most samples for none or one, of the others for many."""
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(10))
    counts = ((drawn - 0.5).clamp(min=0) * 2 * (most + 1)).long()
    return torch.arange(most) < counts[:, None]


def _masked(output: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """(sum, count) of the places that count; to log, how many are right, and a mean as such. Classes are dim 1."""
    losses = F.cross_entropy(output, target, reduction="none")[mask]
    right = ((output.argmax(1) == target) & mask).sum()
    return {"loss": (losses.sum(), mask.sum()), "right": (right, mask.sum()), "per place": losses.detach().mean()}


def masked_tokens() -> Case:
    """A mean over tokens, of which some samples have many and some have none; clipping that bites."""

    def loss(model: nn.Module, batch: Data) -> dict[str, Any]:
        words, mask = batch
        return _masked(model(words[:, :-1]).transpose(1, 2), words[:, 1:], mask)

    words = torch.randint(20, (40, 13), generator=torch.Generator().manual_seed(9))
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 20)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Case(model, optimizer, loss, (words, _some(40, 12)), 16, clip_norm=0.3)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 12, num_layers=2, batch_first=True)
        self.last = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(x)[0])  # type: ignore[no-any-return]


def masked_frames() -> Case:
    """The same over time."""

    def loss(model: nn.Module, batch: Data) -> tuple[torch.Tensor, torch.Tensor]:
        frames, labels, mask = batch
        losses = F.cross_entropy(model(frames).transpose(1, 2), labels[:, None].expand(-1, 9), reduction="none")
        return (losses * mask).sum(), mask.sum()

    model = Tagger().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Case(model, optimizer, loss, (_numbers(45, 9, 6).double(), _labels(45, 3), _some(45, 9)), 15)


def masked_pixels() -> Case:
    """The same over images, with other weights than whole numbers, and BatchNorm, which couples all samples."""

    def loss(model: nn.Module, batch: Data) -> tuple[torch.Tensor, float]:
        images, mask = batch
        weights = mask.double()[:, None, None, :].expand(-1, 1, 12, -1) * 0.37
        return (F.mse_loss(model(images), images[:, :1], reduction="none") * weights).sum(), float(weights.sum())

    layers = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 1, 3, padding=1)
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Case(model, optimizer, loss, (_numbers(39, 3, 12, 12).double(), _some(39, 12)), 16, clip_norm=0.05)


class ActivatedBatchNorm(nn.BatchNorm2d):
    """Ends with the activation, as timm's BatchNormAct2d does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(super().forward(x), inplace=True)


def activated_batchnorm() -> Case:
    """A BatchNorm whose forward is not torch's."""
    layers = nn.Conv2d(3, 8, 3, padding=1, bias=False), ActivatedBatchNorm(8), nn.Conv2d(8, 4, 3, padding=1, bias=False)
    model = nn.Sequential(*layers, ActivatedBatchNorm(4), nn.Flatten(), nn.Linear(4 * 12 * 12, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Case(model, optimizer, _cross_entropy, (_numbers(39, 3, 12, 12).double(), _labels(39, 10)), 16)


def compiled() -> Case:
    """torch.compile wraps the module, and traces forward and backward ahead of time."""
    inner = nn.Sequential(nn.Linear(20, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))
    model = torch.compile(inner, backend="aot_eager")
    optimizer = torch.optim.Adam(inner.parameters(), lr=1e-3)
    return Case(model, optimizer, _cross_entropy, (_numbers(48, 20), _labels(48, 5)), 16)  # type: ignore[arg-type]


MODELS: dict[str, Callable[[], Case]] = {
    "mlp": mlp,
    "conv_batchnorm": conv_batchnorm,
    "lstm": lstm,
    "tied_transformer": tied_transformer,
    "frozen_and_unused": frozen_and_unused,
    "bf16_autocast": bf16_autocast,
    "whole_tensors": whole_tensors,
    "sparse_table": sparse_table,
    "compiled": compiled,
    "masked_tokens": masked_tokens,
    "masked_frames": masked_frames,
    "masked_pixels": masked_pixels,
    "activated_batchnorm": activated_batchnorm,
}
