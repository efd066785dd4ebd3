"""How equal two models are: to the last bit, or up to what."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn


def checksum(model: nn.Module) -> str:
    """Of all parameters and buffers, to the last bit."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def largest_difference(one: Path, other: Path) -> float:
    """Of any element of two saved models, as a share of the largest magnitude in its tensor."""
    expected, found = load_file(one), load_file(other)
    assert expected.keys() == found.keys()
    differences = [
        ((found[name].double() - value.double()).abs().max() / value.double().abs().max()).item()
        for name, value in expected.items()
    ]
    assert all(map(math.isfinite, differences))
    return max(differences)
