"""One answer out of several, as pure functions of tensors.

The combined answer is of the same kind as those of the members, so that an ensemble may stand wherever a member did: in
a metric, in a loss, behind an argmax. What the kind is, the user says:

    logits          scores of classes, whose softmax are probabilities; combined: the logarithm of probabilities,
                    which are logits of exactly those
    probabilities   of classes, which add up to 1
    values          of a regression, of any shape
    labels          numbers of classes, as integers

Probabilities are averaged, not logits: a member that is far too sure of itself has then no more than one voice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from paceline.errors import InvalidInput, ModelError

How = Literal["mean", "majority", "weighted", "stacked"]
Kind = Literal["logits", "probabilities", "values", "labels"]
HOWS, KINDS = get_args(How), get_args(Kind)
_FITTING = {  # which answers can be combined how
    "mean": ("logits", "probabilities", "values"),
    "majority": ("logits", "probabilities", "labels"),
    "weighted": ("logits", "probabilities", "values"),
    "stacked": ("logits", "probabilities", "values"),
}
_TIE = 1e-3  # weight of the mean beside whole votes: it only breaks ties


@dataclass(frozen=True)
class Combination:
    """How answers become one."""

    how: How = "mean"
    kind: Kind = "logits"
    class_dim: int = -1
    weights: tuple[float, ...] | None = None  # by member; of "weighted" and "stacked"

    def check(self, members: int) -> None:
        """Raises if this cannot be done with so many members."""
        if self.how not in HOWS:
            raise InvalidInput("combine", self.how, f"give one of {', '.join(HOWS)}")
        if self.kind not in KINDS:
            raise InvalidInput("outputs", self.kind, f"give one of {', '.join(KINDS)}")
        if self.kind not in _FITTING[self.how]:
            able = ", ".join(how for how in HOWS if self.kind in _FITTING[how])
            raise InvalidInput("combine", self.how, f"{self.kind} can be combined by {able}")
        if (self.weights is not None) != (self.how in ("weighted", "stacked")):
            given = "no weights" if self.weights is None else f"weights {list(self.weights)}"
            takes = "it needs weights=[…], a number a member" if self.weights is None else "only weighted, stacked"
            raise InvalidInput("combine", self.how, f"{takes}, and there are {given}")
        if self.weights is not None:
            if len(self.weights) != members:
                raise InvalidInput("weights", list(self.weights), f"give one for each of the {members} members")
            if not all(-1e30 < weight < 1e30 for weight in self.weights):
                raise InvalidInput("weights", list(self.weights), "give numbers")
            if self.how == "weighted" and (min(self.weights) < 0 or not sum(self.weights) > 0):
                raise InvalidInput("weights", list(self.weights), "give numbers from 0 up, not all of them 0")

    def of(self, answers: Sequence[Any], who: Sequence[int] | None = None) -> torch.Tensor:
        """Returns the one answer; `who`: the members that these are of, by number; None: of all, in their order."""
        self._check_answers(answers)
        stacked = torch.stack(list(answers))
        if self.kind == "labels":
            return stacked.mode(0).values  # of a tie the smallest label
        if self.how == "stacked":
            return stacked_by(stacked, torch.tensor(self.weights, dtype=stacked.dtype), self.kind, self.class_dim)
        if self.kind == "values":
            return _mean(stacked, self._shares(who, stacked))
        probabilities = stacked.softmax(self._dim(stacked)) if self.kind == "logits" else stacked
        mean = _mean(probabilities, self._shares(who, stacked))
        if self.how == "majority":
            mean = majority(probabilities, self._dim(stacked))
        return mean.log() if self.kind == "logits" else mean

    def _shares(self, who: Sequence[int] | None, answers: torch.Tensor) -> torch.Tensor:
        """Returns how much each of these answers counts; together 1."""
        count = len(answers)
        if self.weights is None:
            return answers.new_full((count,), 1 / count)
        weights = answers.new_tensor([self.weights[member] for member in (range(count) if who is None else who)])
        total = weights.sum()
        return weights / total if total > 0 else torch.full_like(weights, 1 / count)

    def _dim(self, stacked: torch.Tensor) -> int:
        return self.class_dim + 1 if self.class_dim >= 0 else self.class_dim

    def _check_answers(self, answers: Sequence[Any]) -> None:
        for answer in answers:
            if not isinstance(answer, torch.Tensor):
                expected = "let each member answer with one tensor, wrap it in a module that picks it"
                raise ModelError("a member's answer", type(answer).__name__, expected)
        shapes = sorted({tuple(answer.shape) for answer in answers})
        if len(shapes) > 1:
            expected = "those of all members must have the same shape, give models for the same task"
            raise ModelError("a member's answer", list(shapes[1]), f"another's is {list(shapes[0])}, and {expected}")
        (shape,), dtype = shapes, answers[0].dtype
        if (self.kind == "labels") == (dtype.is_floating_point or dtype.is_complex):
            right = "integers" if self.kind == "labels" else "real numbers"
            raise ModelError("a member's answer", str(dtype), f"outputs={self.kind!r} are {right}, give the right kind")
        if self.kind in ("logits", "probabilities"):
            classes = shape[self.class_dim] if -len(shape) <= self.class_dim < len(shape) else 0
            if classes < 2:
                expected = f"it has no two classes along dim {self.class_dim}, give class_dim, or outputs='values'"
                raise ModelError("a member's answer", list(shape), expected)


def _mean(answers: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    return (answers * shares.view(-1, *[1] * (answers.dim() - 1))).sum(0)


def majority(probabilities: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the share of votes that each class has, every member with one vote; of a tie, the mean decides.

    >>> votes = torch.tensor([[[0.9, 0.1]], [[0.4, 0.6]], [[0.45, 0.55]]])
    >>> majority(votes, -1).argmax(-1).tolist(), votes.mean(0).argmax(-1).tolist()
    ([1], [0])
    """
    votes = torch.zeros_like(probabilities).scatter_(dim, probabilities.argmax(dim, keepdim=True), 1.0)
    return (votes.mean(0) + _TIE * probabilities.mean(0)) / (1 + _TIE)


def stacked_by(answers: torch.Tensor, weights: torch.Tensor, kind: Kind, class_dim: int) -> torch.Tensor:
    """Returns the sum of the members' log-probabilities, each times its weight, as log-probabilities again; of values,
    the weighted sum itself. Weights are free: one below 0 takes a member's mistakes away."""
    by_member = weights.view(-1, *[1] * (answers.dim() - 1))
    if kind == "values":
        return (answers * by_member).sum(0)
    dim = class_dim + 1 if class_dim >= 0 else class_dim
    logs = answers.log_softmax(dim) if kind == "logits" else answers.clamp_min(1e-30).log()
    pooled = (logs * by_member).sum(0)
    dim_of_one = class_dim
    return pooled.log_softmax(dim_of_one) if kind == "logits" else pooled.softmax(dim_of_one)
