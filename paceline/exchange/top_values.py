"""`--wire topk:0.01`: of every block of 4096 values only the largest travel, each with its place in the block.

            ┌───────────────────────────┬───────────────────┬───
            │ k places (int16), to 4    │ k values (fp32)   │ …      k = share × values of the block, rounded up
            └───────────────────────────┴───────────────────┴───

What does not travel is no error that one could live with: it is nearly everything. So a sender carries it over with
`Feedback`, and a value that stays small is sent when enough of it has come together. Choosing within blocks instead of
among all values costs little of that, and lets a range be cut anywhere between two blocks, with a size that is known
before anything is computed.

NaN counts as larger than everything: a diverged run is seen by every receiver.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.exchange.wire_format import PIECE, check_sizes

_BLOCK = 4096  # a place in it is an int16


@dataclass(frozen=True)
class TopWire:
    """The largest values of every block, and where they are."""

    name: str
    share: float
    lossy: bool = True
    block: int = _BLOCK

    def kept(self, values: int) -> int:
        """Returns how many of a block of so many values travel."""
        return math.ceil(self.share * values)

    def _row_bytes(self, values: int) -> int:
        kept = self.kept(values)
        return _place_bytes(kept) + 4 * kept

    def encoded_bytes(self, elements: int) -> int:
        full, short = divmod(elements, _BLOCK)
        return full * self._row_bytes(_BLOCK) + self._row_bytes(short)

    def encode(self, values: Tensor, out: Tensor) -> None:
        self._encode(values, out, leave_rest=False)

    def encode_rest(self, values: Tensor, out: Tensor) -> None:
        self._encode(values, out, leave_rest=True)

    def _encode(self, values: Tensor, out: Tensor, *, leave_rest: bool) -> None:
        check_sizes(self, values, out)
        for blocks, places, largest in self._pieces(values, out):
            found = blocks.abs().topk(largest.shape[1], dim=1, sorted=False).indices
            places.zero_()
            places[:, : largest.shape[1]].copy_(found)
            largest.copy_(blocks.gather(1, found))
            if leave_rest:
                blocks.scatter_(1, found, 0.0)

    def decode(self, coded: Tensor, out: Tensor) -> None:
        check_sizes(self, out, coded)
        out.zero_()
        for blocks, places, largest in self._pieces(out, coded):
            blocks.scatter_(1, places[:, : largest.shape[1]].long(), largest)

    def decode_add(self, coded: Tensor, out: Tensor) -> None:
        check_sizes(self, out, coded)
        for blocks, places, largest in self._pieces(out, coded):
            blocks.scatter_add_(1, places[:, : largest.shape[1]].long(), largest)

    def _pieces(self, values: Tensor, coded: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Views of both as (blocks, places, values), a row a block: full ones in pieces, then the short one."""
        full, short = divmod(values.numel(), _BLOCK)
        row, rows_at_once = self._row_bytes(_BLOCK), PIECE // _BLOCK
        spans = [(first, min(first + rows_at_once, full), _BLOCK) for first in range(0, full, rows_at_once)]
        for first, last, size in [*spans, *([(full, full + 1, short)] if short else [])]:
            begins = _place_bytes(self.kept(size))
            rows = coded[first * row :][: (last - first) * self._row_bytes(size)].view(last - first, -1)
            blocks = values[first * _BLOCK :][: (last - first) * size].view(-1, size)
            yield blocks, rows[:, :begins].view(torch.int16), rows[:, begins:].view(torch.float32)


def _place_bytes(kept: int) -> int:
    return -(-2 * kept // 4) * 4
