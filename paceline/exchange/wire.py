"""How gradients look on a link between hosts: `--wire fp32|bf16|fp16|int8`, and `topk:SHARE` (`top_values.py`).

A link is the one place where bytes are dear, so only what crosses a link is coded. Sums are always made in
float32: a receiver decodes into float32 and adds there. A wire turns a 1-D float32 tensor into a 1-D uint8
tensor and back; it has no state and allocates nothing that grows with the tensor.

    fp32    4 bytes a value     exact
    bf16    2 bytes a value     8 significant bits, the range of float32
    fp16    2 bytes a value     11 significant bits; beyond ±65504 it saturates instead of becoming inf
    int8    1.004 bytes a value blocks of 1024 values, each with a scale of its own:

            ┌──────────────┬─────────────────────┬──────────────┬────
            │ scale (fp32) │ 1024 codes (int8)   │ scale (fp32) │ …     value = scale × code
            └──────────────┴─────────────────────┴──────────────┴────
            The last block may be shorter; zero bytes fill it up to a multiple of four.

Scales lie next to their codes rather than in a table in front, so that any whole number of blocks can be
coded, sent and decoded on its own, while the rest is still being computed.

A diverged run must be seen by every receiver: NaN and inf arrive as they are on the first three wires, and
make their whole block NaN on int8, where no code could stand for them.

int8 loses up to half a scale a value, so a value that stays below half the scale of its block would never
arrive at all. `Feedback` (feedback.py) carries what was lost into the next step: over a run the losses cancel instead
of adding up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.exchange.top_values import TopWire
from paceline.exchange.wire_format import PIECE, Wire, check_sizes
from paceline.exchange.wire_names import WIRES, check_wire, top_share

_BLOCK = 1024  # int8: values that share a scale
_SCALE_BYTES = 4
_ROW_BYTES = _SCALE_BYTES + _BLOCK
_HIGHEST_CODE = 127
_FP16_HIGHEST = torch.finfo(torch.float16).max
# A smaller scale would be subnormal and its reciprocal infinite. Values this small do not move a parameter.
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class FloatWire:
    """Each value on its own, as another floating-point type."""

    name: str
    dtype: torch.dtype
    lossy: bool = False
    block: int = 1

    def encoded_bytes(self, elements: int) -> int:
        return elements * self.dtype.itemsize

    def encode(self, values: Tensor, out: Tensor) -> None:
        check_sizes(self, values, out)
        out.view(self.dtype).copy_(values)

    def encode_rest(self, values: Tensor, out: Tensor) -> None:
        self.encode(values, out)
        values.sub_(out.view(self.dtype))

    def decode(self, coded: Tensor, out: Tensor) -> None:
        check_sizes(self, out, coded)
        out.copy_(coded.view(self.dtype))

    def decode_add(self, coded: Tensor, out: Tensor) -> None:
        check_sizes(self, out, coded)
        typed = coded.view(self.dtype)
        for start in range(0, out.numel(), PIECE):
            out[start : start + PIECE].add_(typed[start : start + PIECE])


@dataclass(frozen=True)
class SaturatingWire(FloatWire):
    """fp16, whose range gradients can leave: too large a finite value becomes the largest there is."""

    def encode(self, values: Tensor, out: Tensor) -> None:
        check_sizes(self, values, out)
        typed = out.view(self.dtype)
        for start in range(0, values.numel(), PIECE):
            piece = values[start : start + PIECE]
            lowest, highest = torch.aminmax(piece)
            # Nearly always inside, and then one pass to look and one to convert are all there is.
            if not (lowest >= -_FP16_HIGHEST and highest <= _FP16_HIGHEST):
                # inf was not made by this wire: it stays, for a diverged run to be seen. clamp keeps NaN.
                piece = torch.where(piece.isinf(), piece, piece.clamp(-_FP16_HIGHEST, _FP16_HIGHEST))
            typed[start : start + PIECE].copy_(piece)


@dataclass(frozen=True)
class BlockWire:
    """int8: blocks of values, each as whole multiples of its own scale, the largest one as ±127."""

    name: str
    lossy: bool = True
    block: int = _BLOCK

    def encoded_bytes(self, elements: int) -> int:
        full, short = divmod(elements, _BLOCK)
        return full * _ROW_BYTES + (_SCALE_BYTES + -(-short // 4) * 4 if short else 0)

    def encode(self, values: Tensor, out: Tensor) -> None:
        self._encode(values, out, leave_rest=False)

    def encode_rest(self, values: Tensor, out: Tensor) -> None:
        self._encode(values, out, leave_rest=True)

    def _encode(self, values: Tensor, out: Tensor, *, leave_rest: bool) -> None:
        check_sizes(self, values, out)
        scratch = torch.empty(min(values.numel(), PIECE), device=values.device)
        for blocks, scales, codes in _pieces(values, out):
            # Two reductions without a copy; norms and aminmax over a dim are several times slower on a CPU.
            largest = torch.maximum(blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True).neg_())
            scale = largest.div_(_HIGHEST_CODE).clamp_(min=_SMALLEST_SCALE)
            # NaN has come through all this; an infinite scale would decode as NaN only where the code is 0.
            scale.masked_fill_(scale.isinf(), torch.nan)
            scales.copy_(scale)
            multiples = torch.mul(blocks, scale.reciprocal(), out=scratch[: blocks.numel()].view_as(blocks)).round_()
            codes.copy_(multiples)
            if leave_rest:
                blocks.sub_(multiples.mul_(scale))  # what the receiver makes of the codes, to the bit
        short = values.numel() % _BLOCK
        if short:
            out[out.numel() - (-short % 4) :].zero_()

    def decode(self, coded: Tensor, out: Tensor) -> None:
        check_sizes(self, out, coded)
        for blocks, scales, codes in _pieces(out, coded):
            blocks.copy_(codes).mul_(scales)

    def decode_add(self, coded: Tensor, out: Tensor) -> None:
        check_sizes(self, out, coded)
        scratch = torch.empty(min(out.numel(), PIECE), device=out.device)
        for blocks, scales, codes in _pieces(out, coded):
            blocks.add_(scratch[: blocks.numel()].view_as(blocks).copy_(codes).mul_(scales))


def _pieces(values: Tensor, coded: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Views of both as (blocks, scales, codes), a row a block: full ones in pieces, then the short one."""
    full, short = divmod(values.numel(), _BLOCK)
    rows_at_once = PIECE // _BLOCK
    for first in range(0, full, rows_at_once):
        last = min(first + rows_at_once, full)
        rows = coded[first * _ROW_BYTES : last * _ROW_BYTES].view(-1, _ROW_BYTES)
        blocks = values[first * _BLOCK : last * _BLOCK].view(-1, _BLOCK)
        yield blocks, rows[:, :_SCALE_BYTES].view(torch.float32), rows[:, _SCALE_BYTES:].view(torch.int8)
    if short:
        row = coded[full * _ROW_BYTES :].view(1, -1)
        codes = row[:, _SCALE_BYTES : _SCALE_BYTES + short].view(torch.int8)
        yield values[full * _BLOCK :].view(1, -1), row[:, :_SCALE_BYTES].view(torch.float32), codes


_WIRES: dict[str, Wire] = {
    coding.name: coding
    for coding in (
        FloatWire("fp32", torch.float32),
        FloatWire("bf16", torch.bfloat16),
        SaturatingWire("fp16", torch.float16),
        BlockWire("int8"),
    )
}
assert tuple(_WIRES) == WIRES


def wire(name: str) -> Wire:
    """The wire of that name, which codes values without regard to what they are part of.

    >>> wire("bf16").encoded_bytes(10)
    20
    """
    check_wire(name)
    if (share := top_share(name)) is not None:
        return TopWire(name, share)
    return _WIRES[name]
