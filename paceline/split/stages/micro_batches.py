"""A batch in micro-batches, cut along the samples."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch

from paceline.data.batch_values import map_leaves, tensors_in
from paceline.errors import DataError
from paceline.split.collectives import bounds


def length_of(batch: Any) -> int:
    """Returns how many samples there are: the leading size that most tensors have, the first one's if none is more
    frequent."""
    sizes = Counter(tensor.size(0) for tensor in tensors_in(batch) if tensor is not None and tensor.dim())
    if not sizes:
        raise DataError(
            "batch", type(batch).__name__, "it has no tensors with a dim of samples to make micro-batches of"
        )
    return sizes.most_common(1)[0][0]


def micro_batches(batch: Any, count: int) -> list[tuple[Any, float]]:
    """Returns at most `count` of them, none without samples, each with its share of the samples.

    Tensors with as many rows as there are samples are cut, and lists of as many plain things; all else goes to all."""
    length = length_of(batch)
    if length == 0:
        return [(batch, 1.0)]
    ends = bounds(length, min(count, length))
    return [(part_of(batch, length, start, stop), (stop - start) / length) for start, stop in itertools.pairwise(ends)]


def part_of(batch: Any, length: int, start: int, stop: int) -> Any:
    """Returns the samples from `start` to `stop` of a batch of `length`."""

    def is_list(value: Any) -> bool:
        plain = isinstance(value, list) and len(value) == length
        return plain and all(tensor is None for tensor in tensors_in(value))

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf[start:stop] if leaf.dim() and leaf.size(0) == length else leaf
        return leaf[start:stop] if is_list(leaf) else leaf

    return map_leaves(cut, batch, is_leaf=is_list)
