"""Requests as one batch, and its answer in parts again: rows below each other, each request with its own.

Requests of the same shape go together. With padding, those do too whose sizes differ: each is filled up with zeros
behind its own numbers to the largest of the batch, in every dim but the first; and what the answer has too much of, in
the dims that follow from those, is cut off again.

Which dims of an answer these are is seen, not guessed (`PaddedSizes`): a size of 10 may be ten classes, or the length
of the longest request. Answers to other lengths tell them apart:

    ids [1, 10] ─▶ logits [1, 10]      either
    ids [1,  7] ─▶ logits [1, 10]      ten classes, whatever the length
    ids [1,  7] ─▶ logits [1,  7]      as long as ids

A batch that comes before this is known is computed again, each request by itself, which shows it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.serve.served_model import Arrays
from paceline.serve.shared_values import StackedRows

InputDim = tuple[str, int]  # an input that is padded, and a dim of it


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


def has_rows(outputs: Mapping[str, np.ndarray], count: int) -> bool:
    """Returns whether all of an answer has so many rows."""
    return all(value.ndim and len(value) == count for value in outputs.values())


class PaddedSizes:
    """Which sizes of a model's answers follow from those of its padded inputs, as far as its answers have shown."""

    def __init__(self, pads: Collection[str] = ()) -> None:
        self._pads = frozenset(pads)
        self._output_dims: dict[tuple[str, int, int], _OutputDim] = {}  # by output, how many dims it has, which it is

    @property
    def pads(self) -> frozenset[str]:
        """Returns the inputs whose sizes may differ in a batch; none any more once a size was seen that follows from
        nothing known."""
        return self._pads

    def learn(self, outputs: Mapping[str, np.ndarray], requests: Sequence[Arrays]) -> bool:
        """Takes note of an answer's sizes, and returns False if one was the first that follows from nothing known: it
        cannot be told what would be cut off, so from now on requests of several sizes are not put together."""
        if not self._pads:
            return True
        own = [self._sizes(inputs) for inputs in requests]
        given = {dim: max(sizes[dim] for sizes in own) for dim in own[0]}
        for name, value in outputs.items():
            for at in range(1, value.ndim):
                key, size = (name, value.ndim, at), value.shape[at]
                if (known := self._output_dims.get(key)) is None:
                    known = self._output_dims[key] = _OutputDim(size, given, set(given))
                known.saw(size, given)
                if not known.fixed and not known.follows:
                    self._pads = frozenset()
                    return False
        return True

    def divided(
        self, outputs: Mapping[str, np.ndarray], requests: Sequence[Arrays], rows: Sequence[int]
    ) -> list[dict[str, np.ndarray]] | None:
        """Returns the part of each request, which has so many rows; None if it is not known what is whose."""
        if len(requests) == 1:
            return [dict(outputs)]
        differ = len({shape_of(inputs) for inputs in requests}) > 1
        parts, start = [], 0
        for inputs, count in zip(requests, rows, strict=True):
            own = {name: value[start : start + count] for name, value in outputs.items()}
            if differ:
                within = self._within(own, inputs, requests)
                if within is None:
                    return None
                own = {name: value[within[name]] for name, value in own.items()}
            parts.append(own)
            start += count
        return parts

    def _within(
        self, rows: Mapping[str, np.ndarray], inputs: Arrays, requests: Sequence[Arrays]
    ) -> dict[str, tuple[slice, ...]] | None:
        """Returns what is a request's own of its rows of each output; None if that is not known."""
        if not self._pads:
            return None
        own = self._sizes(inputs)
        several = {dim for dim in own if len({other[dim[0]].shape[dim[1]] for other in requests}) > 1}
        found = {}
        for name, value in rows.items():
            ends = [len(value)]
            for at in range(1, value.ndim):
                end = self._output_dims[name, value.ndim, at].end(value.shape[at], own, several)
                if end is None:
                    return None
                ends.append(end)
            found[name] = tuple(map(slice, ends))
        return found

    def _sizes(self, inputs: Arrays) -> dict[InputDim, int]:
        padded = {name: array for name, array in inputs.items() if name in self._pads}
        return {(name, at): array.shape[at] for name, array in padded.items() for at in range(1, array.ndim)}


@dataclass
class _OutputDim:
    """One dim of an output, and what its size may come from; of what is not so, one answer is enough to tell."""

    size: int  # in the first answer
    given: Mapping[InputDim, int]  # sizes of padded inputs in the first answer
    follows: set[InputDim]  # it has always been as large as each of these
    fixed: bool = True  # it has always had the same size
    varied: set[InputDim] = field(default_factory=set)  # these had several sizes, so that it would have been seen

    def saw(self, size: int, given: Mapping[InputDim, int]) -> None:
        """Takes note of its size in an answer to inputs of these sizes."""
        self.fixed = self.fixed and size == self.size
        self.follows = {dim for dim in self.follows if given.get(dim) == size}
        self.varied |= {dim for dim, first in self.given.items() if given.get(dim) != first}

    def end(self, size: int, own: Mapping[InputDim, int], several: set[InputDim]) -> int | None:
        """Returns where a request's own part ends, of so many in the batch; None if that is not known. `own`: its
        sizes; `several`: those in which requests of the batch differ."""
        if not several <= self.varied:
            return None
        ends = {own[dim] for dim in self.follows} | ({size} if self.fixed else set())
        return ends.pop() if len(ends) == 1 else None
