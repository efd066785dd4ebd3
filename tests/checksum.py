"""The bits of a model as one short text, for replicas that have to agree on all of them."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def checksum(model: nn.Module) -> str:
    """Of all parameters and buffers, to the last bit."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
