"""What a lossy wire has lost so far is owed, and sent with the next step."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.exchange.wire_format import PIECE, Wire


class Feedback:
    """What one sender has lost so far on one range of values, and still owes.

    Each step sends `values + residual`, and what the coding loses of that is the next residual. It is only
    *proposed* until the step is accepted: a step that is dropped or redone was never received, so its loss
    does not count and the old residual is still owed. Two buffers that change roles hold both, and `commit`
    moves nothing.
    """

    def __init__(self, elements: int, wire: Wire, memory: tuple[Tensor, Tensor] | None = None) -> None:
        """`memory`: where to keep both buffers, the first of which has what is owed already."""
        self._wire = wire
        # What is owed after the last accepted step; and what will be after the next, if it is.
        self.residual, self._proposed = memory or (torch.zeros(elements), torch.zeros(elements))
        assert self.residual.numel() == self._proposed.numel() == elements
        self._pending = False

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Code `values` and what is owed into `out`; a proposal that was not committed is replaced."""
        wire, elements = self._wire, self.residual.numel()
        assert values.numel() == elements, (values.shape, elements)
        self._pending = False
        for start in range(0, elements, PIECE):
            piece = slice(start, min(start + PIECE, elements))
            coded = out[wire.encoded_bytes(piece.start) : wire.encoded_bytes(piece.stop)]
            owed = torch.add(values[piece], self.residual[piece], out=self._proposed[piece])
            wire.encode_rest(owed, coded)
        self._pending = True

    def commit(self) -> None:
        """The step was accepted: what it lost is what is owed now. Without a proposal, nothing changes."""
        if self._pending:
            self.residual, self._proposed = self._proposed, self.residual
            self._pending = False

    def rollback(self) -> None:
        """The step was dropped, or will be redone: what was owed before it still is."""
        self._pending = False
