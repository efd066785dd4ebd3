"""A course: how a replica goes through the data, together with the others. Each strategy has one of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.data import Feed, Ledger
from paceline.loop.passes import Evaluation, Passes
from paceline.run_place import Place


@dataclass(frozen=True)
class Training:
    """What a script wants trained, and where this is a part of it."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    clip_norm: float | None
    passes: Passes
    place: Place


class Course(Protocol):
    """What a trainer does with it."""

    @property
    def ledger(self) -> Ledger | None: ...

    @property
    def steps(self) -> int: ...

    @property
    def chief(self) -> bool: ...

    def batches(self, feed: Feed, asked: Ledger, epochs: int, prefetch: int) -> Iterator[Any]: ...

    def step(self, batch: Any) -> float: ...

    def rest(self) -> None:
        """Return when nothing is computed in the background."""

    def evaluate(self, measure: Evaluation, length: int) -> Any: ...

    def save(self, path: str | os.PathLike[str], keep: int) -> None: ...

    def resume(self, path: str | os.PathLike[str], fall_back: bool) -> bool: ...

    def close(self) -> None: ...
