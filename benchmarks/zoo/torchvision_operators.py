"""Lets torchvision be imported where its compiled operators cannot be loaded.

Its wheels are built for one kind of device, and without the libraries of that the import ends at an operator that is
not there. No model of the zoo uses those operators (non-maximum suppression and the like), so the name is enough.
`transformers` imports torchvision too.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

_kept: list[Any] = []  # a library of operators lives as long as its object


def stand_in() -> None:
    """Defines what the import looks for, unless the compiled operators are there."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    try:
        torch.ops.load_library(str(Path(found.origin).with_name("_C.so")))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)
