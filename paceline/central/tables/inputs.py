"""Which part of a batch a table looks up: so its rows can be asked for before the model runs.

A model may do anything with a batch, so this is learned by watching: when a table is called, its input is found in the
batch that is being computed. It is one of the batch's tensors, or a view of one (a column, a slice), or has the values
of one (after `.long()` or `.to(…)`). The same place in another batch is then a good guess at what will be looked up
there. It is no more than that: whoever uses it compares with the real input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.data.batch_values import tensors_in

CREDIT = 4  # guesses that may be wrong before there are no more; right ones give it back


def tensors_of(batch: Any) -> list[torch.Tensor | None]:
    """Return all leaves of a batch, in order; None for those that are no tensors."""
    return list(tensors_in(batch))


@dataclass(frozen=True)
class _View:
    """Some elements of a tensor that lies in memory like this one.

    A view with something of every sample has it also where there are more samples or fewer, as in a last batch.
    """

    leaf_size: torch.Size
    leaf_stride: tuple[int, ...]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # from the tensor's first element

    @property
    def _of_every_sample(self) -> bool:
        return bool(self.size) and self.size[0] == self.leaf_size[0] and self.stride[0] == self.leaf_stride[0]

    def of(self, leaf: torch.Tensor) -> torch.Tensor | None:
        if leaf.dim() != len(self.leaf_size) or leaf.stride() != self.leaf_stride:
            return None
        size = list(self.size)
        if self._of_every_sample and leaf.size()[1:] == self.leaf_size[1:]:
            size[0] = leaf.size(0)
        elif leaf.size() != self.leaf_size:
            return None
        return leaf.as_strided(size, self.stride, leaf.storage_offset() + self.offset)


@dataclass(frozen=True)
class _Place:
    """Where in a batch: which leaf, and if not all of it, what view."""

    leaf: int
    dtype: torch.dtype
    view: _View | None

    def of(self, leaves: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Return a copy of what lies there: the batch is the user's, who may change it."""
        leaf = leaves[self.leaf] if self.leaf < len(leaves) else None
        found = leaf if leaf is None or self.view is None else self.view.of(leaf)
        return None if found is None else found.detach().to(self.dtype, copy=True)


class Inputs:
    """Of one table: what it is called with in a pass, call by call."""

    def __init__(self) -> None:
        self._places: list[_Place | None] = []
        self._leaves: list[torch.Tensor | None] = []
        self._calls = 0
        self._credit = CREDIT

    def begin_pass(self, leaves: list[torch.Tensor | None]) -> None:
        """Calls from now on are of this batch."""
        del self._places[self._calls or len(self._places) :]
        self._leaves, self._calls = leaves, 0

    def called(self, input: torch.Tensor) -> None:
        """The table is called with this."""
        place = _found(input, self._leaves)
        if self._calls < len(self._places):
            self._places[self._calls] = place
        else:
            self._places.append(place)
        self._calls += 1

    def expected(self, leaves: list[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return what the table will most likely be called with when that batch is computed."""
        if not self._credit:
            return []
        found = [place.of(leaves) for place in self._places if place is not None]
        return [input for input in found if input is not None and input.numel()]

    def judge(self, *, right: bool) -> None:
        """What came of a guess. Pulling what nobody needs is a cost: after too many wrong ones there are no more."""
        self._credit = min(CREDIT, self._credit + 1) if right else max(0, self._credit - 1)


def _found(input: torch.Tensor, leaves: Sequence[torch.Tensor | None]) -> _Place | None:
    for number, leaf in enumerate(leaves):
        if leaf is not None and (place := _as_view(input, leaf, number)) is not None:
            return place
    for number, leaf in enumerate(leaves):
        if leaf is not None and leaf.shape == input.shape and torch.equal(leaf.to(input.dtype), input):
            return _Place(number, input.dtype, None)
    return None


def _as_view(input: torch.Tensor, leaf: torch.Tensor, number: int) -> _Place | None:
    if input.dtype != leaf.dtype or input.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr():
        return None
    offset = int(input.storage_offset()) - int(leaf.storage_offset())
    if offset < 0 or offset + _extent(input) > _extent(leaf):
        return None
    if offset == 0 and input.size() == leaf.size() and input.stride() == leaf.stride():
        return _Place(number, input.dtype, None)
    return _Place(number, input.dtype, _View(leaf.size(), leaf.stride(), input.size(), input.stride(), offset))


def _extent(tensor: torch.Tensor) -> int:
    """Return how many elements of memory it reaches over, from its first."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
