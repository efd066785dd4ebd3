"""Evaluations of a run: which one, and what came of it. A script that is resumed finds its results again by these."""

from __future__ import annotations

import msgspec


class EvaluationKey(msgspec.Struct, frozen=True, array_like=True):
    """Which evaluation of a script: where it stands, and how many came before it at the same place."""

    chapter: int
    epoch: int
    position: int
    number: int


class EvaluationResult(msgspec.Struct, frozen=True):
    """What came of it: sums over all samples of the numbers that the metric returns, and the counts of some."""

    key: EvaluationKey
    sums: list[float]
    names: list[str] | None = []  # of the numbers; empty: it is one; None: not known, and sums are as `Evaluation.over`
    counted: list[int] = []  # which of the numbers are divided by a count, and not by the samples
