"""Paceline trains PyTorch models across devices and machines: one plain script, every way of distributing it.

    import paceline as pl

    trainer = pl.Trainer(model, optimizer, loss)
    for batch in trainer.batches(train_set, batch_size=256, epochs=5):
        trainer.step(batch)

Names are loaded when they are first used, so that `paceline --help` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.deadlines import deadline
from paceline.errors import DeadlineExceeded, PacelineError
from paceline.rules import Async, Sync
from paceline.split.values import Layout, Stages, Tiles, Wavefront
from paceline.strategy import Centralized, Mirrored

if TYPE_CHECKING:
    from paceline.collectives import barrier, broadcast, gather, mean
    from paceline.distributed import distribute, place
    from paceline.ensemble.ensemble import Ensemble
    from paceline.graph.whole import whole
    from paceline.serve.predictor import load
    from paceline.trainer import Trainer
    from paceline.trial_values import trial

__version__ = "0.1.0"
__all__ = [
    "Async",
    "Centralized",
    "DeadlineExceeded",
    "Ensemble",
    "Layout",
    "Mirrored",
    "PacelineError",
    "Stages",
    "Sync",
    "Tiles",
    "Trainer",
    "Wavefront",
    "__version__",
    "barrier",
    "broadcast",
    "deadline",
    "distribute",
    "gather",
    "load",
    "mean",
    "place",
    "trial",
    "whole",
]

_LAZY = {
    "Ensemble": "paceline.ensemble.ensemble",
    "Trainer": "paceline.trainer",
    "barrier": "paceline.collectives",
    "broadcast": "paceline.collectives",
    "distribute": "paceline.distributed",
    "gather": "paceline.collectives",
    "load": "paceline.serve.predictor",
    "mean": "paceline.collectives",
    "place": "paceline.distributed",
    "trial": "paceline.trial_values",
    "whole": "paceline.graph.whole",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
