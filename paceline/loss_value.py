"""What a loss comes to: over some of a step's samples, and over all of them.

A loss is a mean: over samples, or over something that it counts itself, such as tokens. A mean over parts of unequal
size is not the mean of theirs, so what travels from passes, devices and replicas are *parts* that can be added up:

    returned             a part has                              the mean over all parts
    a scalar             its share of the mean, no count         Σ total
    (sum, count)         the sum, and the count                  Σ total / Σ count

Backward of a scalar begins with its share, and gradients add up to that of the mean. Of a sum nobody knows yet what it
will be divided by: others count at the same time. So backward begins with the sum over a *unit*, and whoever adds
gradients up weighs each of them by unit / Σ count. A replica on its own chooses its unit by the first count it sees:
that is about its own count, so that gradients are as large as those of a mean, and fit into 16 bits. Replicas that add
something up in the middle of backward, as exact BatchNorm does, have one unit in common: the samples of the step.

This module does not import torch: parts also travel to servers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from paceline.errors import LossError

if TYPE_CHECKING:
    import torch


class MeanPart(msgspec.Struct, frozen=True, array_like=True):
    """What some samples give to a mean over all of a step's.

    >>> MeanPart(6.0, 2.0) + MeanPart(6.0, 1.0)
    MeanPart(total=12.0, count=3.0)
    >>> _.mean
    4.0
    """

    total: float
    count: float | None = None  # None: a mean over samples, and the total is their share of it

    def __add__(self, other: MeanPart) -> MeanPart:
        if self.count is None or other.count is None:
            assert self.count is other.count, "kinds are compared before"
            return MeanPart(self.total + other.total)
        return MeanPart(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> float:
        """Of all parts added up, what they come to; of nothing at all, not a number."""
        if self.count is None:
            return self.total
        return self.total / self.count if self.count else math.nan


class LossPart(msgspec.Struct, frozen=True, array_like=True):
    """What the loss of some samples is of the step's, and the numbers that it logs."""

    loss: MeanPart | None = None  # None: nothing was computed here, or another device speaks for this one
    unit: float = 1.0  # of a sum: by what it was divided before its backward
    logged: dict[str, MeanPart] = {}

    def __add__(self, other: LossPart) -> LossPart:
        if self.loss is None or other.loss is None:
            return other if self.loss is None else self
        check_alike([self, other])
        logged = {name: part + other.logged[name] for name, part in self.logged.items()}
        return LossPart(self.loss + other.loss, max(self.unit, other.unit), logged)

    @property
    def counted(self) -> bool:
        """Whether it is a sum and a count."""
        return self.loss is not None and self.loss.count is not None

    def weight(self, count: float | None) -> float:
        """Returns what its gradient is multiplied by, if the counts of all parts add up to `count`."""
        return self.unit / count if count else 1.0

    @property
    def means(self) -> dict[str, float]:
        """What was logged, when all parts are added up."""
        return {name: part.mean for name, part in self.logged.items()}


NOTHING = LossPart()


def over_samples(parts: Sequence[MeanPart], samples: Sequence[int]) -> MeanPart:
    """Returns what parts come to that were computed apart, each as if its samples were all.

    >>> over_samples([MeanPart(1.0), MeanPart(4.0)], [2, 1]).mean
    2.0
    """
    if parts[0].count is not None:
        counts = math.fsum(part.count for part in parts if part.count is not None)
        return MeanPart(math.fsum(part.total for part in parts), counts)
    return MeanPart(math.fsum(part.total * size for part, size in zip(parts, samples, strict=True)) / sum(samples))


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────


def words(*, counted: bool) -> str:
    return "(sum, count)" if counted else "a scalar"


def check_alike(parts: Sequence[LossPart]) -> None:
    """Refuses parts of one step that cannot be added up."""
    first, *others = parts
    for other in others:
        if other.counted != first.counted:
            raise differing_kinds(counted=other.counted)
        if other.logged.keys() != first.logged.keys():
            name = sorted(other.logged.keys() ^ first.logged.keys())[0]
            raise LossError("loss", f"a dict with {name!r}", "another part of the batch has no such key, always log it")
        for name, part in other.logged.items():
            if (part.count is None) != (first.logged[name].count is None):
                expected = "it is another kind in another part of the batch, return the same in all"
                raise LossError(f"logged {name}", words(counted=part.count is not None), expected)


def differing_kinds(*, counted: bool) -> LossError:
    expected = f"another part of the batch has {words(counted=not counted)}, return the same kind in all"
    return LossError("loss", words(counted=counted), expected)


def nothing_counted(step: int) -> LossError:
    return LossError(
        "loss",
        "a sum over 0",
        f"the counts of the whole batch add up to nothing (at step {step}); leave out samples that have nothing to "
        "count, or give a larger batch_size",
    )


# ── before backward ──────────────────────────────────────────────────────────────────────────────────────────


class SumUnit:
    """By what a replica divides its sums in one step before their backward."""

    def __init__(self, samples: int, whole: int, common: float | None = None) -> None:
        """`samples`: of this replica; `whole`: of the step; `common`: the unit that all replicas have."""
        self._samples, self._share = samples, samples / whole
        self._unit = common or 0.0  # until something was counted

    def of(self, count: float, share: float) -> float:
        """Returns it; the first sum is over `count`, of samples that are that share of the step's."""
        if not self._unit:
            self._unit = count * self._share / share or float(self._samples)
        return self._unit


@dataclass(frozen=True)
class Weight:
    """What a pass over some samples counts in its step."""

    share: float  # of the step's samples
    unit: SumUnit
    silent: bool = False  # another device of the replica runs backward from the same loss

    def part(self, share: float) -> Weight:
        """Returns the weight of a part of the pass, with so much of its samples."""
        return Weight(share * self.share, self.unit, self.silent)

    def silenced(self) -> Weight:
        """Returns the same for a device whose backward begins with nothing."""
        return Weight(self.share, self.unit, silent=True)

    @classmethod
    def whole(cls, samples: int = 1) -> Weight:
        """Returns that of a pass that is the whole step."""
        return cls(1.0, SumUnit(samples, samples))


@dataclass(frozen=True)
class FoundLoss:
    """A loss that was computed and looked at, and whose backward has not run."""

    tensor: torch.Tensor
    value: float
    count: float | None = None  # of a sum
    logged: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)

    def weighted(self, weight: Weight) -> torch.Tensor | None:
        """Returns what backward begins with; None: this is a sum over nothing, and no gradient comes of it."""
        if self.count == 0.0 and not self.tensor.requires_grad:
            return None
        if weight.silent:
            return self.tensor * 0.0
        factor = weight.share if self.count is None else 1.0 / weight.unit.of(self.count, weight.share)
        return self.tensor if factor == 1.0 else self.tensor * factor

    def backward(self, weight: Weight) -> None:
        begin = self.weighted(weight)
        if begin is not None:
            begin.backward()  # type: ignore[no-untyped-call]

    def part(self, weight: Weight) -> LossPart:
        """Returns what it is of the step's loss. A number that is logged without a count is weighted as the loss is."""
        logged = {name: self._logged(*found, weight) for name, found in self.logged.items()} if self.logged else {}
        if self.count is None:
            return LossPart(MeanPart(self.value * weight.share), logged=logged)
        return LossPart(MeanPart(self.value, self.count), weight.unit.of(self.count, weight.share), logged)

    def _logged(self, value: float, count: float | None, weight: Weight) -> MeanPart:
        if count is not None:
            return MeanPart(value, count)
        if self.count is None:
            return MeanPart(value * weight.share)
        return MeanPart(value * self.count if self.count else 0.0, self.count)
