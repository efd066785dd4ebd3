"""Which engine a process trains with: that follows from its place."""

from __future__ import annotations

from paceline.loop.engine import Engine
from paceline.loop.solo import Solo
from paceline.loop.training_loop import Training


def open_engine(training: Training) -> Engine:
    """Returns the engine of this process: plain torch if it is alone, else one that knows the others."""
    place = training.place
    if place.strategy.on_servers:
        from paceline.central.replica.opening import open_replica

        return open_replica(training)
    if place.world == 1 and place.board is None:
        return Solo(training.model, training.optimizer, training.clip_norm)
    from paceline.central.replica.only_tables import TablesOnServers
    from paceline.mirrored.opening import open_mirrored

    return open_mirrored(training, TablesOnServers)
