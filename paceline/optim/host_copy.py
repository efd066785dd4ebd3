"""A model on an accelerator, and its copy in the host's memory, which is all that owners and servers know of it.

    accelerator   model ── forward, backward ──▶ gradients
                    ▲                                │ each when backward has made it
    host          copy's parameters ◀── owner ◀── arena, or a server's memory

Parameters and the optimizer's state live outside of the accelerator, once a host or on servers, as those of a model on
a CPU do; the accelerator has what it computes with. So a strategy is the same on any device that torch has: a step
begins with a copy to it, and ends with one from it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import ModelError, StrategyError
from paceline.optim.models import copied, own_state

HOST = torch.device("cpu")


class SameModel:
    """A model that is computed with where its parameters are: there is nothing to copy."""

    is_elsewhere = False  # whether it is not in the host's memory

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.on_device = model
        self.model, self.optimizer = model, optimizer

    def to_device(self) -> None:
        """It is there."""

    def bring(self, version: int) -> None:
        """Whatever was pulled is what it computes with."""

    def buffers_back(self) -> None:
        """They have never been away."""


class HostCopy(SameModel):
    """The copy of one process's model."""

    is_elsewhere = True

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.on_device = model
        self._version = -1  # of the parameters that the device has
        self._users_optimizer = optimizer  # which schedulers change
        self.model, self.optimizer = copied(model, optimizer, "the device", to=HOST)
        own, there = own_state(self.model), own_state(model)
        self._parameters = list(zip(own.parameters(), there.parameters(), strict=True))
        self._buffers = list(zip(own.buffers(), there.buffers(), strict=True))
        self.counterparts = dict(self._parameters)  # by parameter of the copy, that which is computed with

    @torch.no_grad()
    def to_device(self) -> None:
        """Has the model on the device hold what the copy does."""
        for here, there in (*self._buffers, *self._parameters):
            there.copy_(here)

    def bring(self, version: int) -> None:
        """The same, but for parameters that the device has in this version already; -1 is none."""
        if version == -1 or version != self._version:
            self.to_device()
            self._version = version
        else:
            self.buffers_to_device()

    @torch.no_grad()
    def buffers_to_device(self) -> None:
        """Has the model on the device hold the buffers that the copy does."""
        for here, there in self._buffers:
            there.copy_(here)

    @torch.no_grad()
    def buffers_back(self) -> None:
        """Has the copy hold the buffers that forward has changed."""
        for here, there in self._buffers:
            here.copy_(there)

    def take_options(self) -> None:
        """Has the copy's optimizer the user's options: the learning rate, and whatever else a schedule changes."""
        for own, users in zip(self.optimizer.param_groups, self._users_optimizer.param_groups, strict=True):
            own.update({name: value for name, value in users.items() if name != "params"})


def device_of(model: nn.Module) -> torch.device:
    """The one device that all parameters are on; that of a model without any is the host's."""
    found = {parameter.device: name for name, parameter in own_state(model).named_parameters()}
    found.pop(torch.device("meta"), None)  # of a table that servers will draw
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise ModelError("model", second, f"it is on {other} and {first} on {one}; use one device")
    return next(iter(found), HOST)


def check_device(model: nn.Module, wanted: str) -> None:
    """The model has to be where `--devices` says."""
    found, there = device_of(model), torch.device(wanted)
    if (found.type, found.index or 0) != (there.type, there.index or 0):
        expected = f"the model of this replica is on {found}, put it there: model.to(pl.place().accelerator)"
        raise StrategyError("devices", wanted, expected)
