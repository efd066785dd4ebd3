"""What an optimizer may make of the rounding of a gradient: by how much it can move a parameter, at most.

Two correct runs have gradients that differ by rounding, in any element by at most ρ so far. SGD moves a parameter by
lr·ρ more or less, momentum μ by lr·ρ/(1 - μ). Adam divides a mean of gradients, m, by a norm of them, s:

    u = m / d,   d = s + eps,   m = Σ aᵢ gᵢ,   s = √ Σ bᵢ gᵢ²,   Σ aᵢ = Σ bᵢ = 1

Both weights are those of means, so neither m (triangle inequality) nor s (Minkowski's) changes by more than ρ. With
dashes for the other run,

    u' - u = (m' - m) / d + (m' / d') · (d - d') / d,   so   |u' - u| ≤ (1 + c) · ρ / d

where c is the most that |m| / s can be. By Cauchy and Schwarz that is √ Σ aᵢ² / bᵢ: 1 in the first step, never above
(1 - β₁) / √((1 - β₂)(1 - β₁² / β₂)), which is 7.3 for Adam's usual betas.

How large d is, is known: the state of one process has it, element by element. Where gradients are as they usually are
this is next to nothing. Where they are zero in exact arithmetic, d is eps, and a step goes where rounding decides. The
state is taken without its correction for the first steps, which only makes d larger. Of optimizers that normalize and
keep their norm under another name only eps is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

SECOND_MOMENT = "exp_avg_sq"  # as Adam and its like call the square of s


@dataclass(frozen=True)
class Gain:
    """Bounds over all groups of an optimizer, for one step."""

    rate: float = 0.0  # of the largest step that a gradient of 1 can come to
    ratio: float = 1.0  # of m to s
    eps: float | None = None  # None: nothing is divided by the size of a gradient

    @classmethod
    def of(cls, groups: Sequence[Mapping[str, Any]]) -> Gain:
        """
        >>> Gain.of([{"lr": 0.5, "momentum": 0.75}, {"lr": 0.5, "eps": (None, 0.001)}])
        Gain(rate=2.0, ratio=1.0, eps=None)
        >>> Gain.of([{"lr": 0.5, "eps": 1e-8, "betas": (0.9, 0.999)}])
        Gain(rate=0.5, ratio=7.27..., eps=1e-08)
        """
        sizes = [eps for group in groups if isinstance(eps := group.get("eps"), float) and 0 < eps < 1]
        return cls(
            max(map(_rate, groups), default=0.0), max(map(_ratio, groups), default=1.0), min(sizes, default=None)
        )

    @classmethod
    def read(cls, notes: Mapping[str, str]) -> Gain:
        """Returns what was noted with a step."""
        return cls(**json.loads(notes.get("gain", "{}")))

    def note(self) -> str:
        return json.dumps(asdict(self))

    def explained(self, rounding: torch.Tensor, second_moment: torch.Tensor | None) -> torch.Tensor:
        """Returns how far a step may go astray, by element; `second_moment`: of one process, after the step."""
        if self.eps is None:
            return self.rate * rounding
        size = self.eps if second_moment is None else second_moment.double().sqrt() + self.eps
        return self.rate * (1 + self.ratio) * rounding / size


def _rate(group: Mapping[str, Any]) -> float:
    momentum = group.get("momentum")
    kept = momentum if isinstance(momentum, float) and 0 < momentum < 1 else 0.0
    return float(group.get("lr", 1.0)) / (1 - kept)


def _ratio(group: Mapping[str, Any]) -> float:
    match group.get("betas"):
        case (float(first), float(second), *_) if first**2 < second < 1:
            return max(1.0, (1 - first) / math.sqrt((1 - second) * (1 - first**2 / second)))
    alpha = group.get("alpha")  # RMSprop has no mean: its gradient over a norm with that weight
    return 1 / math.sqrt(1 - alpha) if isinstance(alpha, float) and 0 < alpha < 1 else 1.0
