"""What the chief has of a model besides its trained parameters: buffers (BatchNorm's running statistics and others),
parameters that are not trained, and the keys of its state_dict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from paceline.central.chief.tickets import Close
from paceline.central.messages.notes import ChiefNotes
from paceline.central.messages.records import packed
from paceline.errors import CheckpointError, PacelineError


class ModelBuffers:
    """The model's buffers: one copy, and what the replica in each place has made of it."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._given: dict[int, bytes] = {}  # by place

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors)

    def put(self, place: int, given: bytes) -> None:
        if len(given) not in (0, self.size):
            raise PacelineError(f"{len(given)} bytes of buffers were reported instead of {self.size}")
        self._given[place] = given

    def forget(self, places: Iterable[int]) -> None:
        for place in places:
            self._given.pop(place, None)

    def packed(self) -> list[memoryview]:
        return packed(tensor for _, tensor in self.tensors)

    def unpack(self, body: memoryview) -> None:
        """Take the values that `packed` has given."""
        if len(body) != self.size:
            raise CheckpointError(f"a step in the log has {len(body)} bytes of buffers instead of {self.size}")
        for (_, tensor), mine in zip(self.tensors, self.packed(), strict=True):
            mine[:] = body[: tensor.nbytes]
            body = body[tensor.nbytes :]

    def merge(self, close: Close) -> None:
        for (_, tensor), merged in zip(self.tensors, self.merged(close), strict=True):
            tensor.copy_(merged)

    def merged(self, close: Close) -> list[torch.Tensor]:
        """Return what the buffers are after that step."""
        found = [tensor for _, tensor in self.tensors]
        if not found or not all(self._given.get(accepted.replica) for accepted in close.accepted):
            return found
        offset, found = 0, []
        for _, tensor in self.tensors:
            parts = []
            for accepted in close.accepted:
                raw = bytearray(self._given[accepted.replica][offset : offset + tensor.nbytes])
                parts.append(torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape) if raw else tensor)
            if all(torch.equal(part, parts[0]) for part in parts[1:]):
                found.append(parts[0])  # a mean would be that, but for rounding, step after step
            elif tensor.is_floating_point():
                wide = torch.promote_types(tensor.dtype, torch.float32)
                weights = [accepted.samples / close.samples for accepted in close.accepted]
                mean = torch.stack([part.to(wide) * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)
                found.append(mean.to(tensor.dtype))
            else:
                found.append(torch.stack(parts).amax(0))
            offset += tensor.nbytes
        return found


class ModelExtras:
    """Everything of a model that no server trains: the same for all runs."""

    def __init__(self) -> None:
        self.buffers = ModelBuffers()
        self.frozen: list[tuple[str, torch.Tensor]] = []  # parameters that are not trained
        self.keys: list[tuple[str, str]] = []  # of the model's state_dict, and which tensor each is

    def describe(
        self,
        buffers: list[tuple[str, torch.Tensor]],
        frozen: list[tuple[str, torch.Tensor]],
        keys: Sequence[tuple[str, str]] = (),
    ) -> None:
        """The model has these buffers, these parameters that are not trained, and these keys in its state_dict."""
        self.buffers.tensors, self.frozen, self.keys = buffers, frozen, list(keys)

    @property
    def all(self) -> list[tuple[str, torch.Tensor]]:
        return [*self.buffers.tensors, *self.frozen]

    def whole(self) -> dict[str, torch.Tensor]:
        """Return copies, as a snapshot has them."""
        copies = {f"buffer/{name}": tensor.clone() for name, tensor in self.buffers.tensors}
        return copies | {f"frozen/{name}": tensor.clone() for name, tensor in self.frozen}

    def load(self, tensors: Mapping[str, torch.Tensor], notes: ChiefNotes) -> None:
        buffers = [(name, tensors[f"buffer/{name}"]) for name in notes.buffers]
        frozen = [(name, tensors[f"frozen/{name}"]) for name in notes.frozen]
        self.describe(buffers, frozen, notes.keys)
