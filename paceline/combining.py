"""One answer out of several, as pure functions of arrays; nothing here needs torch.

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

import numpy as np

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

Array = np.ndarray[Any, Any]


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

    def quorum(self, given: int | None, members: int) -> int:
        """Returns how many members an answer needs: by default more than half, and of stacked ones, whose weights were
        fitted to all of them together, all."""
        needs_all = self.how == "stacked"
        found = (members if needs_all else members // 2 + 1) if given is None else given
        if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= members:
            raise InvalidInput("quorum", given, f"give a whole number from 1 to {members}, the number of members")
        if needs_all and found < members:
            raise InvalidInput("quorum", given, f"stacked weights belong together, give {members}, or another combine")
        return found

    def of(self, answers: Sequence[Array], who: Sequence[int] | None = None) -> Array:
        """Returns the one answer; `who`: the members that these are of, by number; None: of all, in their order."""
        self._check_answers(answers)
        stacked = np.stack(answers)
        if self.kind == "labels":
            return _commonest(stacked)
        dim = self.class_dim + 1 if self.class_dim >= 0 else self.class_dim
        if self.how == "stacked":
            return self._stacked(stacked, dim)
        if self.kind == "values":
            return _mean(stacked, self._shares(who, stacked))
        probabilities = _softmax(stacked, dim) if self.kind == "logits" else stacked
        if self.how == "majority":
            mean = majority(probabilities, dim)
        else:
            mean = _mean(probabilities, self._shares(who, stacked))
        with np.errstate(divide="ignore"):
            return np.log(mean) if self.kind == "logits" else mean

    def _stacked(self, answers: Array, dim: int) -> Array:
        """Returns the sum of the members' log-probabilities, each times its weight, as log-probabilities again; of
        values, the weighted sum itself. Weights are free: one below 0 takes a member's mistakes away."""
        weights = np.array(self.weights, answers.dtype)
        if self.kind == "values":
            return _mean(answers, weights)
        if self.kind == "logits":
            return _log_softmax(_mean(_log_softmax(answers, dim), weights), self.class_dim)
        return _softmax(_mean(np.log(np.clip(answers, 1e-30, None)), weights), self.class_dim)

    def _shares(self, who: Sequence[int] | None, answers: Array) -> Array:
        """Returns how much each of these answers counts; together 1."""
        count = len(answers)
        if self.weights is None:
            return np.full(count, 1 / count, answers.dtype)
        weights = np.array([self.weights[member] for member in (range(count) if who is None else who)], answers.dtype)
        total = weights.sum()
        return weights / total if total > 0 else np.full_like(weights, 1 / count)

    def _check_answers(self, answers: Sequence[Array]) -> None:
        shapes = sorted({tuple(answer.shape) for answer in answers})
        if len(shapes) > 1:
            expected = "those of all members must have the same shape, give models for the same task"
            raise ModelError("a member's answer", list(shapes[1]), f"another's is {list(shapes[0])}, and {expected}")
        (shape,), dtype = shapes, answers[0].dtype
        if (self.kind == "labels") == (dtype.kind in "fc"):
            right = "integers" if self.kind == "labels" else "real numbers"
            raise ModelError("a member's answer", str(dtype), f"outputs={self.kind!r} are {right}, give the right kind")
        if self.kind in ("logits", "probabilities"):
            classes = shape[self.class_dim] if -len(shape) <= self.class_dim < len(shape) else 0
            if classes < 2:
                expected = f"it has no two classes along dim {self.class_dim}, give class_dim, or outputs='values'"
                raise ModelError("a member's answer", list(shape), expected)


def majority(probabilities: Array, dim: int) -> Array:
    """Returns the share of votes that each class has, every member with one vote; of a tie, the mean decides.

    >>> votes = np.array([[[0.9, 0.1]], [[0.4, 0.6]], [[0.45, 0.55]]])
    >>> majority(votes, -1).argmax(-1).tolist(), votes.mean(0).argmax(-1).tolist()
    ([1], [0])
    """
    votes = np.zeros_like(probabilities)
    np.put_along_axis(votes, probabilities.argmax(dim, keepdims=True), 1.0, dim)
    shares: Array = (votes.mean(0) + _TIE * probabilities.mean(0)) / (1 + _TIE)
    return shares


def _commonest(labels: Array) -> Array:
    """Returns the label that most members give; of a tie the smallest.

    >>> _commonest(np.array([[2, 1], [0, 1], [2, 0], [0, 3]])).tolist()
    [0, 1]
    """
    known = np.unique(labels)
    votes = np.stack([(labels == label).sum(0) for label in known])
    found: Array = known[votes.argmax(0)]
    return found


def _mean(answers: Array, shares: Array) -> Array:
    combined: Array = (answers * shares.reshape(-1, *[1] * (answers.ndim - 1))).sum(0)
    return combined


def _softmax(scores: Array, dim: int) -> Array:
    powers = np.exp(scores - scores.max(dim, keepdims=True))
    shares: Array = powers / powers.sum(dim, keepdims=True)
    return shares


def _log_softmax(scores: Array, dim: int) -> Array:
    lowered = scores - scores.max(dim, keepdims=True)
    logs: Array = lowered - np.log(np.exp(lowered).sum(dim, keepdims=True))
    return logs
