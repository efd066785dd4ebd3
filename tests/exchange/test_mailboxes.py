"""What is left in a mailbox arrives as it is: numbers, shape, type, and how it lies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from paceline.exchange.mailboxes import MOST_DIMS, PIECE_BYTES, Peers
from paceline.memory.channels_last import channels_are_last

sys.path.append(str(Path(__file__).parents[1] / "split"))
from devices import on_devices

IMAGES = torch.randn(2, 3, 6, 5)
LAST = IMAGES.contiguous(memory_format=torch.channels_last)
TENSORS = {
    "planes": IMAGES,
    "channels last": LAST,
    "some rows of planes": IMAGES[:, :, 2:4],
    "some rows, channels last": LAST[:, :, 2:4],
    "one channel": IMAGES[:, :1],
    "one pixel": LAST[:, :, :1, :1],
    "in several pieces, channels last": torch.arange(2 * PIECE_BYTES // 4)
    .view(1, 4, 8, -1)
    .to(memory_format=torch.channels_last),
    "transposed": IMAGES.transpose(2, 3),
    "as many dims as can be": torch.ones([1] * (MOST_DIMS - 1) + [3]),
    "nothing": torch.empty(2, 3, 0, 5),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_tensor_arrives_as_it_lies(tensor: torch.Tensor) -> None:
    def work(peers: Peers) -> torch.Tensor:
        if peers.rank == 0:
            peers.send(tensor, 1)
            return tensor
        return peers.receive(0)

    _, found = on_devices(2, work)
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)
    one_pixel = tensor.dim() == 4 and tensor.shape[2:].numel() == 1  # lies both ways
    assert one_pixel or channels_are_last(found) == channels_are_last(tensor)
