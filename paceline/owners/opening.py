"""Which engine this process trains with: that follows from its place."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from paceline.exchange.board import Board
from paceline.launch.place import Place
from paceline.owners.engine import Engine
from paceline.owners.mirrored import MirroredEngine
from paceline.owners.solo import Solo


def open_engine(model: nn.Module, optimizer: Optimizer, place: Place) -> Engine:
    """The engine for this process."""
    if place.world == 1 and place.board is None:
        return Solo(model, optimizer)
    assert place.board is not None
    return MirroredEngine(model, optimizer, place, Board(place.board))
