"""Notices that a script writes to parameters between two steps, which replicas of a host have in common.

Every replica runs the same lines, so what a script does to a parameter by itself (scales it, adds noise) is done once
for each of them, to the same memory. What gives the same when it is done again (a clamp, loaded values) is right all
the same, and nobody can tell the two apart; so the user is told, once.

Nobody else writes between two steps: a replica leaves a step when all shards are updated, and none is updated again
before all have arrived at the next. Looked at are the elements in the middle of every parameter.
"""

from __future__ import annotations

import warnings

import torch

from paceline.exchange.members import Members
from paceline.memory.model_arena import ModelArena
from paceline.mirrored.step_parts import DecidedStep, StepPart


class ScriptWrites(StepPart):
    """Looks at the parameters at the end of a step and at the beginning of the next."""

    def __init__(self, arena: ModelArena) -> None:
        slots = [slot for slot in arena.layout.slots if slot.elements]
        middles = [slot.offset + slot.elements // 2 * slot.dtype.itemsize for slot in slots]
        places = [range(start, start + slot.dtype.itemsize) for start, slot in zip(middles, slots, strict=True)]
        self._names = [slot.name for slot, place in zip(slots, places, strict=True) for _ in place]
        self._at = torch.tensor([byte for place in places for byte in place], device=arena.parameters.device)
        self._parameters = arena.parameters
        self._left: torch.Tensor | None = None  # how the last step has left them
        self._told = False

    def begin(self, members: Members, number: int) -> None:
        left, self._left = self._left, None
        if left is None or self._told or torch.equal(left, found := self._parameters[self._at]):
            return
        self._told = True
        name = self._names[int((left != found).nonzero()[0])]
        warnings.warn(
            f"the script has written to parameter {name!r} between two steps: replicas of a host share their "
            "parameters, so what it does there is done once for each of them, and is right only if it gives the same "
            "when it is done again; use pl.distribute, where each replica has its own",
            stacklevel=2,
        )

    def decided(self, step: DecidedStep) -> None:
        self._left = None  # where updates overlap with the next forward, the step before was complete in that only

    def closed(self) -> None:
        self._left = None if self._told else self._parameters[self._at]
