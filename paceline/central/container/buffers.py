"""The model's buffers (BatchNorm's running statistics and others), as they are with the servers."""

from __future__ import annotations

import torch

from paceline.central.chief.tickets import Close
from paceline.central.messages.records import packed
from paceline.errors import CheckpointError, PacelineError


class ModelBuffers:
    """The model's buffers: one copy, and what each replica has made of it."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._given: dict[int, bytes] = {}  # by replica

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors)

    def put(self, replica: int, given: bytes) -> None:
        if len(given) not in (0, self.size):
            raise PacelineError(f"replica {replica} reports {len(given)} bytes of buffers instead of {self.size}")
        self._given[replica] = given

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
            if tensor.is_floating_point():
                weights = [accepted.samples / close.samples for accepted in close.accepted]
                mean = torch.stack([part * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)
                found.append(mean.to(tensor.dtype))
            else:
                found.append(torch.stack(parts).amax(0))
            offset += tensor.nbytes
        return found
