"""What every wire can do."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

# Work goes through in pieces of a megabyte of float32: what one operation wrote is in cache for the next. On
# one core this makes adding a bf16 tensor six times as fast as a single operation over the whole of it.
PIECE = 256 * 1024


class Wire(Protocol):
    """A coding of float32 values as bytes.

    Both tensors are contiguous and 1-D, and the coded one starts at a multiple of four bytes in its storage.
    Ranges cut at multiples of `block` can be coded one by one: their bytes, one after the other, are those of
    the whole.
    """

    @property
    def name(self) -> str: ...

    @property
    def lossy(self) -> bool:
        """Whether so much is lost that a sender has to carry it over with `Feedback`."""

    @property
    def block(self) -> int:
        """How many values are coded together."""

    def encoded_bytes(self, elements: int) -> int:
        """How many bytes `elements` values take on the link."""

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write the code of float32 `values` into uint8 `out`, of exactly `encoded_bytes` bytes."""

    def encode_rest(self, values: Tensor, out: Tensor) -> None:
        """The same, and leave in `values` what the receiver will not have of them."""

    def decode(self, coded: Tensor, out: Tensor) -> None:
        """Write the values that `coded` stands for into float32 `out`."""

    def decode_add(self, coded: Tensor, out: Tensor) -> None:
        """Add the values that `coded` stands for to float32 `out`; the same bits as decoding, then adding."""


def check_sizes(wire: Wire, values: Tensor, coded: Tensor) -> None:
    # copy_ and add_ would broadcast a tensor of one element over all the others without a word.
    assert coded.numel() == wire.encoded_bytes(values.numel()), (wire.name, values.shape, coded.shape)
