"""Which engine a process has whose parameters are on servers."""

from __future__ import annotations

import torch
from torch import nn

from paceline.central.replica.cut_replica import FollowingEngine, LeadingEngine
from paceline.central.replica.devices import Devices
from paceline.central.replica.engine import CentralizedEngine
from paceline.central.replica.in_graph import InGraphEngine
from paceline.central.tables.embedding import find_tables
from paceline.errors import ModelError, StrategyError
from paceline.loop.engine import Engine
from paceline.loop.training_loop import Training
from paceline.optim.host_copy import HOST, HostCopy, SameModel, device_of
from paceline.optim.models import copied
from paceline.strategy import Centralized


def open_replica(training: Training) -> Engine:
    """Returns the engine of one replica, of all of them if this process is all, or of one device of a cut one."""
    model, optimizer, place = training.model, training.optimizer, training.place
    strategy = place.strategy
    assert strategy.on_servers
    copy = SameModel
    if (device := device_of(model)) != HOST:
        _check_device(model, device, strategy)
        copy = HostCopy
    if strategy.split is None:
        kind = InGraphEngine if strategy.in_graph else CentralizedEngine
        return kind(model, optimizer, place, strategy, training.clip_norm, copy)
    if place.device:
        return FollowingEngine(Devices(model, optimizer, place, strategy.split), optimizer, place, strategy)
    whole, own = copied(model, optimizer, "--servers")  # before it is cut
    devices = Devices(model, optimizer, place, strategy.split)
    engine = LeadingEngine(devices, whole, own, place, strategy, training.clip_norm)
    engine.client.options_from = optimizer  # which schedulers change
    return engine


def _check_device(model: nn.Module, device: torch.device, strategy: Centralized) -> None:
    """What a replica on an accelerator cannot do so far."""
    if strategy.split is not None:
        expected = f"the model is on {device}, and one that is cut is computed by processes on cores, leave it there"
        raise StrategyError("split", strategy.settings["split"], expected)
    if tables := find_tables(model):
        expected = (
            f"it is on {device}, and sparse embeddings on servers are looked up on the CPU so far, leave it there"
        )
        raise ModelError("model", tables[0].name, expected)
