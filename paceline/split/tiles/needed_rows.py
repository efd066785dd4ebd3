"""Which rows of its input an op needs for some rows of its output. Numbers alone, the same on every device.

Everything is cut evenly: which rows a device has follows from the number of rows. So tensors of the same size are cut
alike, however they came about, and need not be moved to be added.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from paceline.split.collectives import bounds

Range = tuple[int, int]


@lru_cache(maxsize=4096)
def ranges(length: int, parts: int) -> tuple[Range, ...]:
    """Returns which rows every device has.

    >>> ranges(7, 3)
    ((0, 3), (3, 5), (5, 7))
    """
    at = bounds(length, parts)
    return tuple(itertools.pairwise(at))


@dataclass(frozen=True)
class NeededRows:
    """The rows that every device has, those it needs, and how many it needs before the first row and after the last
    one, where there is only padding."""

    have: tuple[Range, ...]
    need: tuple[Range, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def nothing_moves(self) -> bool:
        """Returns whether every device has just what it needs."""
        return self.have == self.need and not any(self.before) and not any(self.after)


def needed_rows(have: tuple[Range, ...], windows: Sequence[Range]) -> NeededRows:
    """Returns them for windows that may reach beyond the input.

    >>> needed_rows(((0, 4), (4, 7)), [(-1, 5), (3, 8)])
    NeededRows(have=((0, 4), (4, 7)), need=((0, 5), (3, 7)), before=(1, 0), after=(0, 1))
    """
    length = have[-1][1]
    need, before, after = [], [], []
    for low, high in windows:
        start, stop = (min(max(edge, 0), length) for edge in (low, high))
        need.append((start, stop))
        before.append(min(max(-low, 0), high - low))
        after.append(high - low - before[-1] - (stop - start))
    return NeededRows(have, tuple(need), tuple(before), tuple(after))


@lru_cache(maxsize=4096)
def sliding(
    length: int, outputs: int, parts: int, kernel: int, stride: int, before: int, dilation: int, exactly: bool = False
) -> NeededRows:
    """Returns what a convolution or a pooling needs, `before` rows of padding being in front. Of rows that a device has
    anyway it may be given fewer than a stride beyond that, of which nothing comes, rather than a copy without them: not
    if it is to be what is needed `exactly`, because rows are rounded up.

    >>> sliding(8, 4, 2, kernel=1, stride=2, before=0, dilation=1).nothing_moves
    True
    """
    reach = dilation * (kernel - 1) + 1
    have = ranges(length, parts)
    windows = []
    for (start, stop), (_, last) in zip(ranges(outputs, parts), have, strict=True):
        end = (stop - 1) * stride - before + reach
        windows.append((start * stride - before, last if not exactly and end < last < end + stride else end))
    return needed_rows(have, windows)


def output_rows(length: int, kernel: int, stride: int, padding: Range, dilation: int, ceil: bool = False) -> int:
    """Returns how many rows a convolution or a pooling gives.

    >>> output_rows(7, 3, 2, (1, 1), 1), output_rows(8, 3, 2, (0, 0), 1), output_rows(8, 3, 2, (0, 0), 1, ceil=True)
    (4, 3, 4)
    """
    room = length + sum(padding) - dilation * (kernel - 1) - 1
    outputs = room // stride + 1
    if ceil:
        outputs = -(-room // stride) + 1
        if (outputs - 1) * stride >= length + padding[0]:  # a window that would begin in the padding after the end
            outputs -= 1
    return outputs


@dataclass(frozen=True)
class Spread:
    """What a transposed convolution needs, and by device which rows of what it then gives are its own."""

    needed: NeededRows
    starts: tuple[int, ...]


@lru_cache(maxsize=4096)
def spreading(length: int, outputs: int, parts: int, kernel: int, stride: int, before: int, dilation: int) -> Spread:
    """Returns it. Input row i adds to the output rows from i · stride − before on, every `dilation`-th, `kernel` of
    them."""
    reach = dilation * (kernel - 1)
    windows, starts = [], []
    for start, stop in ranges(outputs, parts):
        first = max(0, -(-(start + before - reach) // stride))
        last = min(length - 1, (stop - 1 + before) // stride)
        windows.append((first, max(first, last + 1)))
        starts.append(start - (first * stride - before))
    return Spread(needed_rows(ranges(length, parts), windows), tuple(starts))


def each(value: Any, spatial: int) -> tuple[int, ...]:
    """Returns one number a spatial dim, from what torch takes."""
    given = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return given * spatial if len(given) == 1 else given


def paddings(padding: Any, kernels: Sequence[int], dilations: Sequence[int]) -> list[Range]:
    """Returns the padding by spatial dim: before, after. It is as convolutions take it.

    >>> paddings("same", (4, 3), (1, 2)), paddings(1, (3, 3), (1, 1))
    ([(1, 2), (2, 2)], [(1, 1), (1, 1)])
    """
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernels, dilations, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in each(0 if padding == "valid" else padding, len(kernels))]
