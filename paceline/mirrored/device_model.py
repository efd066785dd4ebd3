"""A replica whose model is on an accelerator.

What owners know is its copy in the host's memory, whose parameters lie in the arena. Those are copied to the device
when a step is complete, and gradients go from there into the arena as backward makes them; buffers that forward has
changed follow when it is over.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from paceline.exchange.members import Members
from paceline.exchange.together import Together
from paceline.mirrored.model_part import WholeModel
from paceline.mirrored.one_host import OneHost
from paceline.mirrored.shared_model import SharedModel
from paceline.optim.host_copy import HostCopy


class DeviceModel(WholeModel):
    """A replica that has all of the model, on a device that is not the host."""

    def __init__(self, copy: HostCopy, shared: SharedModel, together: Together, hosts: OneHost) -> None:
        self._copy = copy
        super().__init__(copy.model, shared, together, hosts)
        copy.to_device()  # one that joins finds other values than it has begun with

    @property
    def computed_with(self) -> nn.Module:
        return self._copy.on_device

    def _sources(self) -> list[nn.Parameter]:
        return [self._copy.counterparts[parameter] for parameter in self._shared.trained]

    def begin(self, members: Members, number: int) -> None:
        super().begin(members, number)
        self._copy.take_options()
        self._copy.buffers_to_device()  # a try that was given up has changed its buffers

    def mark(self, used: list[bool]) -> None:
        self._copy.buffers_back()
        super().mark(used)

    def closed(self) -> None:
        self._copy.to_device()

    def take_buffers(self) -> None:
        super().take_buffers()
        self._copy.buffers_to_device()

    def take_state(self, model: dict[str, torch.Tensor], fill: Callable[[], None], elsewhere: set[str]) -> None:
        super().take_state(model, fill, elsewhere)
        self._copy.to_device()
