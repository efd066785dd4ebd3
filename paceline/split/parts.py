"""The parts of a cut model: which piece of every parameter and buffer a device has, and where its gradients go.

Parameters lie whole in the arena. A cut computes with views of its pieces, and with pieces of buffers of its own; those
of the first replica are left in the arena after a step, from where every device's model has them whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from paceline.optim.gradients import Destination, Discard, IntoBuffer
from paceline.optim.model_in_arena import ModelInArena
from paceline.optim.models import own_state
from paceline.split.cut import WHOLE, Cut, TensorPart


class Parts:
    """One device's parts of the tensors of a model that lies whole in an arena."""

    def __init__(self, cut: Cut, shared: ModelInArena, process: int, model: nn.Module) -> None:
        self._cut = cut
        self._shared = shared
        self._model = own_state(model)
        self._process = process
        self._first = process - (cut.peers.rank - cut.peers.here.start)  # of this replica's processes
        self._of: list[TensorPart] = [WHOLE] * len(shared.layout.slots)
        self._of_buffers: list[TensorPart] = [WHOLE] * len(shared.buffers)
        self._buffers: list[torch.Tensor] = list(shared.buffers)

    def take(self) -> tuple[list[nn.Parameter], list[Destination]]:
        """Gives the cut this device's parts, after `Cut.prepare`. Returns those of the trained parameters, and where
        their gradients are to go."""
        arena, slots = self._shared.arena, self._shared.layout.slots
        self._of = [self._cut.part_of(slot.name) for slot in slots]
        self._of_buffers = [self._cut.part_of(name) for name, _ in self._model.named_buffers()]
        parameters = [
            _parameter(part.of(arena.parameter(slot)), parameter) if part.index else parameter
            for slot, parameter, part in zip(slots, self._shared.parameters, self._of, strict=True)
        ]
        self._buffers = [
            part.of(buffer.data).clone() if part.index else buffer
            for buffer, part in zip(self._shared.buffers, self._of_buffers, strict=True)
        ]
        names = [name for name, _ in self._model.named_buffers()]
        tensors = {slot.name: parameter for slot, parameter in zip(slots, parameters, strict=True)}
        self._cut.take({**tensors, **dict(zip(names, self._buffers, strict=True))})
        trained = len(self._shared.trained)
        destinations: list[Destination] = []
        for slot, part in zip(slots[:trained], self._of, strict=False):
            row = self._process if part.adds_to is None else self._first + part.adds_to
            place = part.of(arena.gradient(row, slot))
            destinations.append(IntoBuffer(place) if part.adds else Discard())
        return parameters[:trained], destinations

    def mark(self, used: list[bool], marks: torch.Tensor) -> None:
        """Marks by slot whether this process's buffer has a gradient. What several share is its holder's to say."""
        rank = self._cut.peers.rank
        marks[: len(used)] = torch.tensor(
            [u and part.adds and part.adds_to in (None, rank) for u, part in zip(used, self._of, strict=False)],
            dtype=torch.uint8,
        )

    # ── buffers ──────────────────────────────────────────────────────────────────────────────────────────

    def publish_buffers(self) -> None:
        """Leaves in the arena those buffers that are this device's to tell."""
        if self._first:
            return
        for (place, _), own, part in zip(self._shared.buffer_places(), self._buffers, self._of_buffers, strict=True):
            if part.adds:
                part.of(place).copy_(own)

    def take_buffers(self, total: Callable[[torch.Tensor], torch.Tensor] | None = None, *, first: bool = True) -> None:
        """Takes the buffers in the arena, whole ones and this device's parts of them; with the `total` over several
        hosts, those of the `first`."""
        for (place, buffer), own, part in zip(
            self._shared.buffer_places(), self._buffers, self._of_buffers, strict=True
        ):
            if total is not None:
                place.copy_(total(place.clone() if first else torch.zeros_like(place)))  # all devices the same bits
            buffer.copy_(place)
            if own is not buffer:
                own.copy_(part.of(place))

    # ── whole tensors ────────────────────────────────────────────────────────────────────────────────────

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Returns the model's own state_dict, as if it were not cut."""
        whole = self._whole()
        return {name: whole.get(tensor, tensor) for name, tensor in self._named_state().items()}

    def take_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes whole tensors, into the parameters in the arena and into this device's buffers."""
        whole = self._whole()
        for name, tensor in self._named_state().items():
            if name in state:
                whole.get(tensor, tensor).copy_(state[name])
        self.take_buffers()

    def _named_state(self) -> dict[str, torch.Tensor]:
        # Tensors themselves and not copies that look the same: they are looked up.
        return self._model.state_dict(keep_vars=True)

    def _whole(self) -> dict[torch.Tensor, torch.Tensor]:
        shared = self._shared
        found: dict[torch.Tensor, torch.Tensor] = {
            parameter: shared.arena.parameter(slot)
            for slot, parameter in zip(shared.layout.slots, shared.parameters, strict=True)
        }
        return found | {buffer: place for place, buffer in shared.buffer_places()}


def _parameter(view: torch.Tensor, like: nn.Parameter) -> nn.Parameter:
    """Returns a parameter in this place. What else is written into the same memory is none of autograd's business."""
    made = nn.Parameter(torch.empty(0, dtype=view.dtype), like.requires_grad)
    made.data = view
    return made
