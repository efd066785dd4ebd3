"""Buffers on servers: the mean of what replicas have made of them, and nothing else."""

from __future__ import annotations

import torch

from paceline.central.chief.tickets import Accepted, Close
from paceline.central.container.buffers import ModelBuffers


def closed(*samples: int) -> Close:
    accepted = [Accepted(1, replica, 1.0, count, 0, 0, []) for replica, count in enumerate(samples)]
    return Close(0, 0, sum(samples), 0.0, accepted)


def given(*values: torch.Tensor) -> ModelBuffers:
    """What replicas have made of one buffer."""
    buffers = ModelBuffers()
    buffers.tensors = [("buffer", torch.zeros_like(values[0]))]
    for replica, value in enumerate(values):
        buffers.put(replica, value.view(torch.uint8).numpy().tobytes())
    return buffers


def test_what_all_replicas_have_alike_stays_as_it_is() -> None:
    for kind in (torch.float32, torch.bfloat16):
        constant = torch.linspace(0.1, 7.3, 200).to(kind)
        (found,) = given(constant, constant, constant).merged(closed(5, 4, 4))
        assert torch.equal(found, constant)


def test_a_mean_of_16_bit_numbers_is_rounded_once() -> None:
    parts = [torch.linspace(0.1, 7.3, 200).add(number).to(torch.bfloat16) for number in range(3)]
    (found,) = given(*parts).merged(closed(4, 4, 4))
    assert torch.equal(found, torch.stack(parts).double().mean(0).to(torch.bfloat16))
