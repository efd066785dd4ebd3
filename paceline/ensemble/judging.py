"""Is an ensemble better than its members? All of them are measured on one validation set, sample by sample.

Each member computes the set once, batch by batch, and what it answers is kept. From then on metrics are computed with
the answers in the place of a model: those of a member, or those of all combined, of whole batches or of single samples.

Weights that were fitted to the very samples they are judged by would flatter the ensemble. So where there are weights
the set is cut into folds, and each fold is answered with weights that were found on the others; those that are told
at the end were found on all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from paceline.combining import Combination, Kind
from paceline.data.batch_values import leaves_in
from paceline.ensemble.combining import combined
from paceline.ensemble.paired_test import PairedResult, compare_pairs
from paceline.ensemble.playback import Playback, answers_heard
from paceline.ensemble.stacking import fit_weights
from paceline.errors import InvalidInput, LossError, ModelError
from paceline.loop.validation import SampleMetric, ValidationSet, mean_of

FOLDS = 5
SAME = 1e-4  # a metric over a batch and the mean over its samples differ by no more than that


class JudgedMember(msgspec.Struct, frozen=True):
    """One member: its metric, and whether the ensemble is better than it."""

    name: str
    value: float
    ensemble_better: PairedResult


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What was found: members, the ensemble, and how it compares with the best of them."""

    metric: str
    maximize: bool
    samples: int
    paired_by: str  # "sample", or "batch" where the metric is no mean over samples
    combine: str
    outputs: str
    weights: list[float] | None
    members: list[JudgedMember]
    value: float  # of the ensemble
    best: str
    better: PairedResult  # than the best member


@dataclass
class _Piece:
    """Neighbouring samples of one fold, and what each member answers to the metric's calls of the model."""

    samples: range
    fold: int
    batch: Any
    calls: list[list[torch.Tensor]]  # by member


class Judge:
    """Measures members and their combination on a validation set."""

    def __init__(self, members: dict[str, nn.Module], validation: ValidationSet) -> None:
        self._members, self._validation = members, validation

    def judge(self, how: str, kind: Kind | None, class_dim: int | None, *, maximize: bool) -> Judgement:
        """Returns how good the ensemble is. `kind` None: what members answer with is found out."""
        folds = FOLDS if how in ("weighted", "stacked") else 1
        pieces = [self._computed(samples, fold) for samples, fold in self._pieces(folds)]
        if kind is None:
            kind, found_dim = find_kind(pieces[0].calls[0][0], pieces[0].batch)
            class_dim = found_dim if class_dim is None else class_dim
        class_dim = -1 if class_dim is None else class_dim
        members = [self._measured(pieces, [piece.calls[at] for piece in pieces]) for at in range(len(self._members))]

        def combination(weights: list[float] | None) -> Combination:
            made = Combination(how, kind, class_dim, None if weights is None else tuple(weights))  # type: ignore[arg-type]
            made.check(len(self._members))
            return made

        combination(None if folds == 1 else [1.0] * len(self._members))  # raises before anything is fitted
        weights: list[float] | None = None
        by_fold: dict[int, Combination] = {0: combination(None)} if folds == 1 else {}
        if folds > 1:
            weights = self._weights(how, kind, class_dim, pieces, members, maximize, but=None)
            for fold in sorted({piece.fold for piece in pieces}):
                fitted = self._weights(how, kind, class_dim, pieces, members, maximize, but=fold)
                by_fold[fold] = combination(fitted)
        together = self._measured(pieces, [_combined(by_fold[piece.fold], piece) for piece in pieces])
        return self._told(how, kind, weights, members, together, maximize=maximize)

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────

    def _pieces(self, folds: int) -> Iterator[tuple[range, int]]:
        length, at_once = self._validation.length, self._validation.at_once
        for fold in range(folds):
            start, stop = fold * length // folds, (fold + 1) * length // folds
            for at in range(start, stop, at_once):
                yield range(at, min(at + at_once, stop)), fold

    def _computed(self, samples: range, fold: int) -> _Piece:
        batch, metric = self._validation.load(samples), self._validation.metric
        return _Piece(samples, fold, batch, [answers_heard(metric, model, batch) for model in self._members.values()])

    # ── the metric ───────────────────────────────────────────────────────────────────────────────────────────

    def _measured(self, pieces: Sequence[_Piece], answers: Sequence[list[torch.Tensor]]) -> _Measured:
        """Returns the metric with these answers in the place of a model's, by piece and, where it can be, by sample."""
        whole, single, agree = [], [], True
        for piece, given in zip(pieces, answers, strict=True):
            size = len(piece.samples)
            total, count = self._number(given, piece.batch, size)
            whole.append((total, count))
            sums, counts = 0.0, 0.0
            for at, sample in enumerate(piece.samples) if agree and _by_sample(given, size) else ():
                one = [answer[at : at + 1] for answer in given]
                found = self._number(one, self._validation.load(range(sample, sample + 1)), 1)
                single.append(found)
                sums, counts = sums + found[0], counts + found[1]
            agree = agree and counts > 0 and abs(sums / counts - total / count) <= SAME * max(1.0, abs(total / count))
        return _Measured(whole, single if agree else None)

    def _number(self, answers: Sequence[torch.Tensor], batch: Any, size: int) -> SampleMetric:
        return self._validation.number(Playback(answers), batch, size)

    # ── weights ──────────────────────────────────────────────────────────────────────────────────────────────

    def _weights(
        self,
        how: str,
        kind: Kind,
        class_dim: int,
        pieces: Sequence[_Piece],
        members: Sequence[_Measured],
        maximize: bool,
        but: int | None,
    ) -> list[float]:
        """Returns weights found on all folds but one."""
        used = [at for at, piece in enumerate(pieces) if piece.fold != but] or list(range(len(pieces)))
        if how == "stacked":
            loss, models = self._validation.loss, self._members.values()
            fitted = [
                (pieces[at].batch, [answers_heard(loss, model, pieces[at].batch) for model in models], size)
                for at in used
                if (size := len(pieces[at].samples))
            ]
            return fit_weights(loss, fitted, kind, class_dim)
        values = [mean_of([member.pieces[at] for at in used]) for member in members]
        if min(values) < 0 or (not maximize and min(values) == 0):
            raise InvalidInput(
                "combine", "weighted", f"a member's {self._validation.told} is {min(values):g}, it needs some above 0"
            )
        return [value if maximize else 1 / value for value in values] if max(values) > 0 else [1.0] * len(values)

    # ── the verdict ──────────────────────────────────────────────────────────────────────────────────────────

    def _told(
        self,
        how: str,
        kind: Kind,
        weights: list[float] | None,
        members: Sequence[_Measured],
        combined: _Measured,
        *,
        maximize: bool,
    ) -> Judgement:
        single = all(measured.samples is not None for measured in (combined, *members))

        def paired(measured: _Measured) -> list[SampleMetric]:
            return measured.samples if single and measured.samples is not None else measured.pieces

        judged = [
            JudgedMember(name, member.value, compare_pairs(paired(combined), paired(member), maximize=maximize))
            for name, member in zip(self._members, members, strict=True)
        ]
        for value in (*(member.value for member in judged), combined.value):
            if not math.isfinite(value):
                raise LossError("metric", value, f"{self._validation.told} must be finite to be compared")
        best = (max if maximize else min)(judged, key=lambda member: member.value)
        return Judgement(
            metric=self._validation.told,
            maximize=maximize,
            samples=self._validation.length,
            paired_by="sample" if single else "batch",
            combine=how,
            outputs=kind,
            weights=weights,
            members=judged,
            value=combined.value,
            best=best.name,
            better=best.ensemble_better,
        )


@dataclass(frozen=True)
class _Measured:
    """A metric as sums and counts: of pieces, and of samples if it is a mean over them."""

    pieces: list[SampleMetric]
    samples: list[SampleMetric] | None

    @property
    def value(self) -> float:
        return mean_of(self.pieces)


def _combined(combination: Combination, piece: _Piece) -> list[torch.Tensor]:
    calls = {len(heard) for heard in piece.calls}
    if len(calls) > 1:
        raise ModelError("metric", sorted(calls), "it calls members differently often, and must call all alike")
    return [combined(combination, answers) for answers in zip(*piece.calls, strict=True)]


def _by_sample(answers: Sequence[torch.Tensor], size: int) -> bool:
    return all(answer.dim() > 0 and len(answer) == size for answer in answers)


def find_kind(answer: torch.Tensor, batch: Any) -> tuple[Kind, int]:
    """Returns what a model answers with, and where its classes lie: it has some if the batch has whole numbers, the
    targets, in just the shape that is left without them."""
    if not answer.is_floating_point():
        return "labels", -1
    targets = [
        tuple(leaf.shape)
        for leaf in leaves_in(batch)
        if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point()
    ]
    for dim in (1, answer.dim() - 1):
        if answer.dim() > 1 and answer.shape[dim] > 1 and (*answer.shape[:dim], *answer.shape[dim + 1 :]) in targets:
            sums = answer.sum(dim)
            is_share = answer.min() >= 0 and torch.allclose(sums, torch.ones_like(sums), atol=1e-3)
            return ("probabilities" if is_share else "logits"), dim
    return "values", -1
