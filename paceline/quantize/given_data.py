"""`--data FILE`: samples in the place of those that the script evaluates on, from a .npz or .safetensors file.

A script that evaluates on a dict of tensors has the same names in the file; any other has the tensors of a sample in
the order of their names there: `x`, `y`, or `arr_0`, `arr_1` as numpy names them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline import checkpoint
from paceline.errors import DataError


def read_data(path: str, own: Any) -> Any:
    """Returns a dataset of what is in the file; `own`: the script's."""
    tensors = _tensors(path)
    lengths = {name: tensor.shape[0] if tensor.dim() else 0 for name, tensor in tensors.items()}
    if not lengths or len(set(lengths.values())) > 1:
        raise DataError("data", path, f"give arrays of equally many samples, these have {lengths}")
    if isinstance(own, Mapping):
        if tensors.keys() != own.keys():
            expected = f"the script evaluates on {', '.join(map(repr, own))}, give arrays of these names"
            raise DataError("data", ", ".join(tensors), expected)
        return {name: _like(tensors[name], own[name]) for name in own}
    ordered = [tensors[name] for name in sorted(tensors)]
    sample = own if isinstance(own, tuple | list) else own[0] if hasattr(own, "__getitem__") else None
    parts = list(sample) if isinstance(sample, tuple | list) else [sample]
    if len(parts) != len(ordered):
        raise DataError("data", ", ".join(sorted(tensors)), f"give {len(parts)}, as the script evaluates on")
    found = [_like(tensor, part) for tensor, part in zip(ordered, parts, strict=True)]
    return tuple(found) if isinstance(sample, tuple | list) else found[0]


def _tensors(path: str) -> dict[str, torch.Tensor]:
    if path.endswith(".safetensors"):
        return checkpoint.read_model(path)
    try:
        with np.load(Path(path), allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except (OSError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise DataError("data", path, f"it cannot be read as a .npz file ({error})") from error


def _like(tensor: torch.Tensor, part: Any) -> torch.Tensor:
    """Returns it in the type that the script's own numbers have."""
    return tensor.to(part.dtype) if isinstance(part, torch.Tensor) else tensor
