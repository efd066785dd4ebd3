"""`--wire powersgd:4`: matrices travel as the product of two thin ones (PowerSGD, Vogels et al. 2019).

A host's gradient M (n × m), and what it still owes, is projected on the basis that the step before has found:

    P = M · basis         n × 4    summed over all hosts, and made orthonormal
    Q = Mᵀ · P            m × 4    summed over all hosts: the basis of the next step
    sum of all M ≈ P · Qᵀ          and each host owes its own M − P · (its own Q)ᵀ

so (n + m) × 4 values cross instead of n × m. The residuals of all hosts together are exactly what the sum lacks.

Each matrix has a home, a host that sums its P and its Q, makes P orthonormal, and sends both back: all hosts compute
with the same bits, whatever their processors make of a decomposition. What is no matrix, or too small to gain, travels
as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.exchange.coded_sums import Owed, PlainSum, Round

_LEAST_GAIN = 2  # a matrix is worth two products if they are half of its values at most


@dataclass(frozen=True)
class Matrix:
    """Rows × columns of a range of values, from `start` on."""

    start: int
    rows: int
    columns: int
    number: int  # of all matrices of a model

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def of(self, values: Tensor) -> Tensor:
        return values[self.start : self.start + self.elements].view(self.rows, self.columns)


def as_matrix(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Returns the rows and columns of a tensor that is worth being two products; None if it is not.

    >>> as_matrix((2048, 2048), 4), as_matrix((64, 3, 3, 3), 2), as_matrix((2048,), 4), as_matrix((10, 8), 4)
    ((2048, 2048), (64, 27), None, None)
    """
    if len(shape) < 2:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows, columns) if _LEAST_GAIN * rank * (rows + columns) <= rows * columns else None


def first_basis(matrix: Matrix, rank: int) -> Tensor:
    """Returns what a run begins with: random, and the same on all hosts."""
    return torch.randn(matrix.columns, rank, generator=torch.Generator().manual_seed(matrix.number))


class LowRankSum:
    """Neighbouring tensors of a model, of which some are matrices."""

    def __init__(
        self, elements: int, matrices: Sequence[Matrix], rank: int, host: int, hosts: int, owed: Owed, bases: list[Owed]
    ) -> None:
        """`bases`: by matrix, that of the last accepted step and room for the next."""
        self._matrices, self._rank, self._host, self._hosts = matrices, rank, host, hosts
        self._owed, self._bases = owed, bases
        self._homes = [matrix.number % hosts for matrix in matrices]
        self._pending = False
        covered = [(matrix.start, matrix.start + matrix.elements) for matrix in matrices]
        ends = [0, *(stop for _, stop in covered)]
        starts = [*(start for start, _ in covered), elements]
        self._gaps = [(begin, end) for begin, end in zip(ends, starts, strict=True) if end > begin]
        self._rest = torch.empty(sum(end - begin for begin, end in self._gaps))
        self._plain = PlainSum(self._rest, host, hosts)

    def rounds(self, values: Tensor) -> Iterator[Round]:
        self._pending = False
        residual, proposed = self._owed
        wanted = [
            torch.add(matrix.of(values), matrix.of(residual), out=matrix.of(proposed)) for matrix in self._matrices
        ]
        lefts = [matrix @ basis for matrix, (basis, _) in zip(wanted, self._bases, strict=True)]
        yield from self._sum(lefts, _orthonormal)
        rights = [matrix.t() @ left for matrix, left in zip(wanted, lefts, strict=True)]
        for matrix, left, right in zip(wanted, lefts, rights, strict=True):
            matrix.addmm_(left, right.t(), alpha=-1)  # what this host will owe
        yield from self._sum(rights)
        for place, left, right, (_, basis) in zip(self._matrices, lefts, rights, self._bases, strict=True):
            torch.mm(left, right.t(), out=place.of(values))
            basis.copy_(right)
        yield from self._sum_rest(values)
        self._pending = True

    def _sum(self, tensors: list[Tensor], finish: Callable[[Tensor], Tensor] | None = None) -> Iterator[Round]:
        """Replaces each tensor by its sum over all hosts, which its home has finished."""
        host, hosts = self._host, self._hosts
        at_home: list[list[Tensor]] = [[] for _ in range(hosts)]
        for tensor, home in zip(tensors, self._homes, strict=True):
            at_home[home].append(tensor)
        flats = [torch.cat([tensor.reshape(-1) for tensor in group]) if group else torch.empty(0) for group in at_home]
        received = [torch.empty_like(flats[host]) for _ in range(hosts)]
        yield Round(received, flats)
        for other in range(hosts):
            if other != host:
                flats[host].add_(received[other])
        if finish is not None:
            for tensor, part in zip(at_home[host], _like(at_home[host], flats[host]), strict=True):
                part.copy_(finish(part.view(tensor.shape)).reshape(-1))
        yield Round(flats, [flats[host]] * hosts)
        for group, flat in zip(at_home, flats, strict=True):
            for tensor, part in zip(group, _like(group, flat), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def _sum_rest(self, values: Tensor) -> Iterator[Round]:
        gaps = [values[begin:end] for begin, end in self._gaps]
        for part, gap in zip(_like(gaps, self._rest), gaps, strict=True):
            part.copy_(gap)
        yield from self._plain.rounds(self._rest)
        for part, gap in zip(_like(gaps, self._rest), gaps, strict=True):
            gap.copy_(part)

    def commit(self) -> None:
        if self._pending:
            self._owed = (self._owed[1], self._owed[0])
            self._bases = [(proposed, basis) for basis, proposed in self._bases]
            self._pending = False


def _like(tensors: Sequence[Tensor], flat: Tensor) -> Sequence[Tensor]:
    """Returns the parts of `flat` that are as long as these tensors."""
    return torch.split(flat, [tensor.numel() for tensor in tensors])


def _orthonormal(columns: Tensor) -> Tensor:
    """Returns orthonormal columns that span the same; some that do, where these are zero or nearly alike."""
    spanning: Tensor = torch.linalg.qr(columns.double())[0]
    return spanning.float()
