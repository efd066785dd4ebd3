"""Dims of tensors, and which of them are the same.

A dim of a tensor is a product of *atoms*, from the outermost in: an attention's projection may be `3 · heads · width`.
Tracing a model joins atoms: those of a weight with those of what it is multiplied with, those of two operands of a
sum. A reshape splits an atom into factors. What is joined has one name, and is cut everywhere alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


class Atom:
    """A factor of a dim. Atoms that were joined are one: compare what `find` returns."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._same: Atom | None = None
        self._factors: list[Atom] | None = None

    def find(self) -> Atom:
        """Returns the one that stands for all that this one was joined with."""
        found = self
        while found._same is not None:
            found = found._same
        if found is not self:
            self._same = found  # a layer's chain is as long as the model is deep
        return found

    def leaves(self) -> list[Atom]:
        """Returns the factors it has been split into, or itself."""
        found = self.find()
        if found._factors is None:
            return [found]
        return [leaf for factor in found._factors for leaf in factor.leaves()]

    def split(self, inner: int) -> None:
        """Splits it into an outer factor, and an inner one of that size."""
        self._factors = [Atom(self.size // inner), Atom(inner)]

    def __repr__(self) -> str:
        return f"Atom({self.size})"


Dim = list[Atom]
Dims = list[Dim]


def leaves(dim: Sequence[Atom]) -> Dim:
    """Returns the atoms of a dim as they are now; factors of 1 are none, unless there is nothing else."""
    found = [leaf for atom in dim for leaf in atom.leaves()]
    return [leaf for leaf in found if leaf.size != 1] or found[:1]


def repeated(dims: Sequence[Sequence[Atom]]) -> set[Atom]:
    """Returns the atoms that several of these dims have in common, or one has more than once."""
    seen = Counter(leaf for dim in dims for leaf in leaves(dim))
    return {leaf for leaf, times in seen.items() if times > 1}


def size(dim: Sequence[Atom]) -> int:
    """Returns the number of elements along a dim."""
    return math.prod(atom.size for atom in dim)


def join(one: Sequence[Atom], other: Sequence[Atom]) -> bool:
    """Makes two dims of one size the same, and splits factors as needed. Returns False if they do not fit into each
    other."""
    if size(one) != size(other):
        return False
    while True:
        left, right = leaves(one), leaves(other)
        for a, b in zip(reversed(left), reversed(right), strict=False):
            if a is b:
                continue
            if a.size == b.size:
                b._same = a
                break
            larger, smaller = (a, b) if a.size > b.size else (b, a)
            if larger.size % smaller.size:
                return False
            larger.split(smaller.size)
            break
        else:
            return True


def regroup(dims: Sequence[Sequence[Atom]], shape: Sequence[int]) -> Dims | None:
    """Returns the dims of a reshape to `shape`, by the same atoms; None if some atom would be torn apart unevenly."""
    rest = [leaf for dim in dims for leaf in leaves(dim)]
    found: Dims = []
    for wanted in reversed(shape):
        dim: Dim = []
        while size(dim) < wanted:
            if not rest:
                return None
            last = rest.pop()
            need = wanted // size(dim)
            if last.size <= need:
                dim.insert(0, last)
            elif last.size % need == 0 and wanted % size(dim) == 0:
                last.split(need)
                rest += last.leaves()
            else:
                return None
        if size(dim) != wanted:
            return None
        found.insert(0, dim or [Atom(1)])
    return found if size(rest) == 1 else None
