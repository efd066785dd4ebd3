"""What a `Trainer` needs of an architecture, and the made-up data that all of them are trained on."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

STEPS, BATCH = 3, 12
SAMPLES = STEPS * BATCH


@dataclass(frozen=True)
class Case:
    """A model, its optimizer, the loss people use with it, and samples for all steps."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[nn.Module, Any], torch.Tensor]
    data: Any


def adamw(model: nn.Module) -> Optimizer:
    """As transformers are trained, with BERT's epsilon.

    Some gradients are zero but for rounding, those of the biases of keys say: a smaller one would make steps of them.
    """
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)


def momentum(model: nn.Module) -> Optimizer:
    """As convolutional networks are trained."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def numbers(*shape: int) -> torch.Tensor:
    """Normal numbers, a row a sample."""
    return torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(7))


def whole_numbers(below: int, *shape: int, seed: int = 8) -> torch.Tensor:
    """Whole numbers from 0 to below that, a row a sample."""
    return torch.randint(below, (SAMPLES, *shape), generator=torch.Generator().manual_seed(seed))


def samples(**columns: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """A dataset of dicts, as those of `datasets` are."""
    return [{name: column[row] for name, column in columns.items()} for row in range(SAMPLES)]


def own_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss that a model of `transformers` computes itself when it is given labels."""
    return model(**batch).loss  # type: ignore[no-any-return]


def without_dropout(model: nn.Module) -> None:
    """Switches off all that is drawn at random in forward: dropout, stochastic depth, layers left out."""
    words = ("dropout", "pdrop", "drop_prob", "drop_path", "drop_rate", "layerdrop")
    for module in model.modules():
        for held in (module, getattr(module, "config", None)):
            for name, value in vars(held).items() if held is not None else ():
                if isinstance(value, float) and any(word in name for word in words):
                    setattr(held, name, 0.0)
        if isinstance(getattr(module, "p", None), float):  # nn.Dropout and its kin, torchvision's StochasticDepth
            module.p = 0.0


class _TorchInDouble(types.ModuleType):
    """torch, as a module sees it that asks for float32."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def all_in_double(model: nn.Module) -> None:
    """Makes a model compute in float64 throughout.

    Those of `transformers` compute norms, some softmaxes and the loss in float32 whatever they are made of. Then the
    order of sums, another one in every strategy, shows in the eighth digit, and small mistakes hide behind it.
    """
    model.double()
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and vars(module).get("torch") is torch:
            module.torch = _TorchInDouble("torch")  # type: ignore[attr-defined]
