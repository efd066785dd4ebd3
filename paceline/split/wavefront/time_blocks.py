"""Time steps as rows, one step after another: the way torch packs sequences of several lengths, longest first.

    step 0   rows 0 1 2          of three sequences, of lengths 3, 3 and 1
    step 1   rows 3 4            a step has no more rows than the one before
    step 2   rows 5 6

Sequences of one length are the case in which every step has as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


class TimeBlocks:
    """How many rows each time step has, and which rows a block of steps has.

    >>> steps = TimeBlocks([3, 2, 2])
    >>> steps.blocks(2), steps.rows(range(1, 3))
    ([range(0, 2), range(2, 3)], slice(3, 7, None))
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self._starts = [0, *accumulate(self.sizes)]

    @property
    def count(self) -> int:
        """Returns how many rows there are in all."""
        return self._starts[-1]

    def blocks(self, time_block: int) -> list[range]:
        """Returns the steps of each time block; the last one may be shorter."""
        length = len(self.sizes)
        return [range(start, min(start + time_block, length)) for start in range(0, length, time_block)]

    def rows(self, block: range) -> slice:
        """Returns the rows of a block."""
        return slice(self._starts[block.start], self._starts[block.stop])

    def within(self, block: range) -> list[slice]:
        """Returns, for every step of a block, its rows among the block's own."""
        first = self._starts[block.start]
        return [slice(self._starts[step] - first, self._starts[step + 1] - first) for step in block]
