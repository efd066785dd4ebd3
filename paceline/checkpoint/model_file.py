"""A model's state_dict as one safetensors file that plain torch loads, and nothing beside it to go on from."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import torch

from paceline.checkpoint.tensor_file import check_storable, write_tensors
from paceline.errors import CheckpointError


def write_plain_model(
    path: str | os.PathLike[str], what: str, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]
) -> None:
    """Write all of it or nothing. `what`: whose tensors these are, for a sentence; `notes` go into the metadata."""
    target = Path(path)
    check_storable(what, tensors)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        try:
            write_tensors(partial, tensors, lambda _: {"format": "pt", **notes})
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error.strerror or error}") from error
