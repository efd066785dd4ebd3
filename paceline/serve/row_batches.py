"""Requests as one batch, and its answer in parts again: rows below each other, each request with its own.

Requests of the same shape go together. With padding, those do too whose sizes differ: each is filled up with zeros
behind its own numbers to the largest of the batch, in every dim but the first; and what the answer has too much of, in
the dims that were filled up, is cut off again.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

import numpy as np

from paceline.serve.served_model import Arrays
from paceline.serve.shared_values import StackedRows


def shape_of(inputs: Arrays, pads: Collection[str] = ()) -> Hashable:
    """Returns what requests must have in common to go together: names, types, and sizes but for those of rows; of
    inputs that are padded, how many dims they have."""
    return tuple(
        (name, array.dtype.char, array.ndim if name in pads else array.shape[1:]) for name, array in inputs.items()
    )


def put_together(requests: Sequence[Arrays]) -> dict[str, np.ndarray | StackedRows]:
    """Returns what the model is given for all of these requests."""
    first = requests[0]
    if len(requests) == 1:
        return dict(first)
    return {name: StackedRows([inputs[name] for inputs in requests]) for name in first}


def divided(
    outputs: Mapping[str, np.ndarray], requests: Sequence[Arrays], rows: Sequence[int]
) -> list[dict[str, np.ndarray]] | None:
    """Returns the part of each request, which has so many rows; None if the answer has others."""
    if len(requests) == 1:
        return [dict(outputs)]
    if not all(value.ndim and len(value) == sum(rows) for value in outputs.values()):
        return None
    filled = _sizes(requests)
    parts, start = [], 0
    for inputs, count in zip(requests, rows, strict=True):
        own = {name: value[start : start + count] for name, value in outputs.items()}
        if filled:
            cut = {at: (size, _size(inputs, at)) for at, size in filled.items()}
            own = {name: value[_within(value, cut)] for name, value in own.items()}
        parts.append(own)
        start += count
    return parts


def _sizes(requests: Sequence[Arrays]) -> dict[int, int]:
    """Returns the dims in which requests differ, but for the first, and the size that all were filled up to."""
    dims = range(1, max(array.ndim for array in requests[0].values()))
    sizes = {at: [_size(inputs, at) for inputs in requests] for at in dims}
    return {at: max(found) for at, found in sizes.items() if min(found) < max(found)}


def _size(inputs: Arrays, at: int) -> int:
    return max((array.shape[at] for array in inputs.values() if array.ndim > at), default=0)


def _within(value: np.ndarray, cut: Mapping[int, tuple[int, int]]) -> tuple[slice, ...]:
    """Returns what is a request's own of its rows of the answer: of a dim that was filled up, its own size."""
    return tuple(
        slice(cut[at][1]) if at in cut and size == cut[at][0] else slice(None) for at, size in enumerate(value.shape)
    )
