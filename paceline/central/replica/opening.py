"""Which engine a process has whose parameters are on servers."""

from __future__ import annotations

from paceline.central.replica.cut_replica import FollowingEngine, LeadingEngine
from paceline.central.replica.devices import Devices
from paceline.central.replica.engine import CentralizedEngine
from paceline.central.replica.in_graph import InGraphEngine
from paceline.loop.engine import Engine
from paceline.loop.training_loop import Training
from paceline.optim.models import copied


def open_replica(training: Training) -> Engine:
    """Returns the engine of one replica, of all of them if this process is all, or of one device of a cut one."""
    model, optimizer, place = training.model, training.optimizer, training.place
    strategy = place.strategy
    assert strategy.on_servers
    if strategy.split is None:
        kind = InGraphEngine if strategy.in_graph else CentralizedEngine
        return kind(model, optimizer, place, strategy, training.clip_norm)
    if place.device:
        return FollowingEngine(Devices(model, optimizer, place, strategy.split), optimizer, place, strategy)
    whole, own = copied(model, optimizer, "--servers")  # before it is cut
    devices = Devices(model, optimizer, place, strategy.split)
    engine = LeadingEngine(devices, whole, own, place, strategy, training.clip_norm)
    engine.client.options_from = optimizer  # which schedulers change
    return engine
