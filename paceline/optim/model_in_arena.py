"""A model whose parameters lie whole in an arena."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import ModelError
from paceline.memory.heap import give_memory_back
from paceline.memory.layout import aligned
from paceline.memory.model_arena import ModelArena
from paceline.optim.models import buffers_of, grouped_parameters
from paceline.optim.state import layout_for

SMALLEST_SCRATCH_BYTES = 8192


class ModelInArena:
    """A model, and the arena in which its parameters lie whole."""

    arena: ModelArena

    def __init__(self, model: nn.Module, optimizer: Optimizer, owners: int, *, whole_tensors: bool = False) -> None:
        """`whole_tensors`: none is cut, whatever the optimizer has to see."""
        named = grouped_parameters(model, optimizer)
        self._device = _device_of(named)
        self.layout = layout_for(optimizer, named, owners, whole_tensors=whole_tensors)
        by_name = {name: parameter for name, parameter, _ in named}
        self.parameters = [by_name[slot.name] for slot in self.layout.slots]
        self.buffers = buffers_of(model)
        self._buffer_shapes = [tuple(buffer.shape) for buffer in self.buffers]  # before a cut makes parts of them

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for slot, p in zip(self.layout.slots, self.parameters, strict=True) if slot.group is not None]

    @property
    def buffer_bytes(self) -> int:
        return sum(aligned(buffer.nbytes) for buffer in self.buffers)

    def fill(self, arena: ModelArena) -> None:
        """Make `arena` the home of this process's parameters."""
        self.arena = arena
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            self.arena.parameter(slot).copy_(parameter.detach())
        self.point_to_arena()

    def point_to_arena(self) -> None:
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            parameter.data = self.arena.parameter(slot)
        give_memory_back()  # what the parameters were before

    def compare_values(self, here: str, there: str) -> None:
        """The model's values must be those in the arena, bit by bit; `there`: who has put those in."""
        for slot, parameter in zip(self.layout.slots, self.parameters, strict=True):
            theirs, mine = self.arena.parameter(slot), parameter.detach()
            if not torch.equal(theirs, mine) and not torch.equal(theirs.isnan(), mine.isnan()):
                raise ModelError("model", slot.name, "it holds NaN in one replica only")
            if not torch.equal(theirs.nan_to_num(), mine.nan_to_num()):
                difference = (theirs - mine).abs().max().item()
                raise ModelError(
                    "model",
                    slot.name,
                    f"this parameter differs between {there} and {here} by {difference:g} at "
                    "the start; set the same seed in every process before the model is made",
                )

    def buffer_places(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each buffer, where the whole of it may lie in the arena."""
        places, offset = [], 0
        for buffer, shape in zip(self.buffers, self._buffer_shapes, strict=True):
            size = math.prod(shape) * buffer.dtype.itemsize
            places.append((self.arena.buffers[offset : offset + size].view(buffer.dtype).view(shape), buffer))
            offset = aligned(offset + size)
        return places


def _device_of(named: Sequence[tuple[str, nn.Parameter, int | None]]) -> torch.device:
    """The one device that all parameters are on."""
    device = named[0][1].device
    for name, parameter, _ in named:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError("model", name, "it has no shape yet; run one batch through the model first")
        if parameter.device != device:
            raise ModelError(
                "model", name, f"it is on {parameter.device} and {named[0][0]} on {device}; use one device"
            )
    return device
